"""lm-evaluation-harness over this engine: its tasks under any policy.

    ambidex-lm-eval --model ambidex --model_args pretrained=smollm2,policy=bounded,max_dropped_mass=0.05 --tasks …

`ambidex-lm-eval` is the harness' own command with the model registered; a program imports this module instead and names
`ambidex` as the model. Needs `pip install ambidex[lm-eval]`.

What a policy computes: of a question, all but the context's last token is the prompt, which attends all keys; that
token and the continuation are decode queries. Rolling perplexity has a prompt of one token, so a budget in percent of
the prompt is the smallest there: give it in tokens.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, RequestError
from ambidex.core.policy import resolve_policy
from ambidex.core.request import SamplingParams
from ambidex.engine.sync import LLM
from ambidex.eval.continuation import score_continuation, split_ids
from ambidex.eval.teacher import Teacher

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT_TOKENS: Final = 256
"""Of generation tasks that do not say, as the harness' own models have it."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p")
_LENGTHS_AND_STOPS: Final = ("do_sample", "until", "max_gen_toks")


@register_model("ambidex")
class AmbidexLM(LM):
    """The engine as a model of the harness.

    Args:
        pretrained: a folder, a `.gguf` file, a Hub id or `smollm2`.
        batch_size, max_batch_size: of the harness; questions are computed one by one, answers as many as fit.
        device: `cuda` or `cpu`; `cuda:0`, which the harness says where nobody says anything, and None are the engine's
            `auto`.
        settings: fields of `EngineConfig`.
    Raises:
        ConfigError, ModelError: the settings or the model cannot be used.
        MachineError: the machine has not what they need.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) != "1" or max_batch_size is not None:
            logger.warning("batch_size has no effect: the engine decides itself how many requests a step computes")
        if device not in (None, "cuda:0"):
            settings["device"] = device
        self._config = EngineConfig.of(pretrained, settings)
        self._is_exact = resolve_policy(self._config).is_exact
        self._teacher: Teacher | None = Teacher(self._config)
        self._llm: LLM | None = None
        self._tokenizer = self._teacher.engine.tokenizer
        self._chat_template = self._teacher.engine.text.chat_template

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether it is what greedy decoding gives) of each continuation."""
        del disable_tqdm
        teacher = self._as_teacher()
        answers = []
        for request in requests:
            context, continuation = request.args
            ids = split_ids(self._tokenizer, context, continuation)
            scored = score_continuation(teacher, *ids, is_exact=self._is_exact)
            answers.append((scored.logprob, scored.is_greedy))
            self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in windows of the context limit that overlap as the harness defines it."""
        del disable_tqdm
        teacher = self._as_teacher()
        answers = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self._tokenizer.encode(request.args[0], add_special=False),
                prefix_token=self._edge_id(),
                max_seq_len=teacher.engine.max_context_len - 2,
                context_len=1,
            )
            total = 0.0
            for context, continuation in map(make_disjoint_window, windows):
                total += score_continuation(teacher, context, continuation, is_exact=self._is_exact).logprob
            answers.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, up to the first of a request's stop strings."""
        del disable_tqdm
        llm = self._as_llm()
        prompts = [str(request.args[0]) for request in requests]
        params = [_sampling(request.args[1]) for request in requests]
        answers = [output.text for output in llm.generate(prompts, params)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: the model has no chat template, or the last message is to be continued.
        """
        if not add_generation_prompt:
            raise RequestError("the last message of a conversation cannot be continued: leave out gen_prefix")
        text = str(self._chat_template.render(chat_history))
        begins = self._tokenizer.bos_token
        # Texts are encoded with the token that begins them: a template that writes it, too, would make two.
        return text.removeprefix(begins) if begins and self._tokenizer.encode("")[:1] == [self._edge_id()] else text

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer where the harness keeps requests."""
        return self._config.model.replace("/", "__")

    def _edge_id(self) -> int:
        edge = self._tokenizer.bos_id
        if edge is None and self._tokenizer.eos_ids:
            edge = self._tokenizer.eos_ids[0]
        if edge is None:
            raise ConfigError("this model's tokenizer has no token that begins or ends a text: rolling tasks need one")
        return edge

    def _as_teacher(self) -> Teacher:
        """The engine for known text; one engine at a time is in memory."""
        self._llm = None
        if self._teacher is None:
            self._teacher = Teacher(self._config)
        return self._teacher

    def _as_llm(self) -> LLM:
        self._teacher = None
        if self._llm is None:
            self._llm = LLM(self._config)
        return self._llm


def _sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """The harness' words for sampling in ours.

    Raises:
        ConfigError: one is unknown here.
    """
    unknown = [name for name in settings if name not in (*_SAMPLING, *_LENGTHS_AND_STOPS)]
    if unknown:
        raise ConfigError(f"generation setting {', '.join(unknown)} is unknown: known are {', '.join(_SAMPLING)}")
    until = settings.get("until") or ()
    own = {name: settings[name] for name in _SAMPLING if name in settings}
    if not settings.get("do_sample", False):
        own = {"temperature": 0.0}
    return SamplingParams(
        max_output_tokens=int(settings.get("max_gen_toks", DEFAULT_OUTPUT_TOKENS)),
        stop=(until,) if isinstance(until, str) else tuple(until),
        **own,
    )


def run() -> None:
    """The harness' command, with this model registered: entry point of `ambidex-lm-eval`."""
    from lm_eval.__main__ import cli_evaluate  # its module is a program's: not when this is a library

    cli_evaluate()


if __name__ == "__main__":
    run()
