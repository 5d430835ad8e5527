// ambidex._native, scores of keys in rows: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "bind/score_rows.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "ops/score_rows.h"
#include "ops/score_thread.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

Number find_float(const char* name, std::string_view number) {
  const Number found = find_number(number);
  AMBIDEX_CHECK(found != Number::kInt8, name, ": expected fp32, bf16 or fp16, got int8");
  return found;
}

struct Checked {
  ScoreForm form;
  std::vector<ScoreCall> calls;
};

Checked check_score(const ConstBytes<3>& q, std::string_view q_number,
                    const std::vector<ConstBytes<3>>& keys, const std::vector<std::size_t>& num_keys,
                    std::string_view number, float scale, const Bytes<1>& scores, std::string_view scores_number) {
  ScoreForm form{};
  form.q_number = find_float("q", q_number);
  form.number = find_float("keys", number);
  form.scores_number = find_float("scores", scores_number);
  check_itemsize("q", q, size_of(form.q_number));
  check_itemsize("scores", scores, size_of(form.scores_number));
  check_size("q", "the requests", q, 0, keys.size());
  AMBIDEX_CHECK(num_keys.size() == keys.size(), "num_keys: expected ", keys.size(), " for the requests, got ",
                num_keys.size());
  AMBIDEX_CHECK(std::isfinite(scale), "scale: expected a finite number, got ", scale);
  form.scale = scale;
  form.head_dim = q.shape(2);
  AMBIDEX_CHECK(form.head_dim >= 1 && q.shape(1) >= 1, "q: has no heads, or heads of no numbers");
  std::vector<ScoreCall> calls;
  calls.reserve(keys.size());
  std::size_t place = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const ConstBytes<3>& k = keys[i];
    if (i == 0) {
      form.num_kv_heads = k.shape(0);
      AMBIDEX_CHECK(form.num_kv_heads >= 1 && q.shape(1) % form.num_kv_heads == 0, "q: has ", q.shape(1),
                    " heads, not a multiple of the ", form.num_kv_heads, " of keys");
      form.group_size = q.shape(1) / form.num_kv_heads;
    }
    check_itemsize("keys", k, size_of(form.number));
    check_size("keys", "the KV heads of the first", k, 0, form.num_kv_heads);
    check_size("keys", "head_dim", k, 2, form.head_dim);
    AMBIDEX_CHECK(num_keys[i] <= k.shape(1), "num_keys: expected at most ", k.shape(1), " rows, got ", num_keys[i]);
    const std::size_t num_scores = q.shape(1) * num_keys[i];
    AMBIDEX_CHECK(num_scores <= scores.shape(0) - place, "scores: ", scores.shape(0),
                  " numbers, too few for all query heads and keys");
    calls.push_back({static_cast<const char*>(q.data()) + i * q.shape(1) * form.head_dim * size_of(form.q_number),
                     k.data(), k.shape(1), num_keys[i],
                     static_cast<char*>(scores.data()) + place * size_of(form.scores_number)});
    place += num_scores;
  }
  return {form, std::move(calls)};
}

void bind_score(ScorePool& self, const ConstBytes<3>& q, std::string_view q_number,
                const std::vector<ConstBytes<3>>& keys, const std::vector<std::size_t>& num_keys,
                std::string_view number, float scale, const Bytes<1>& scores, std::string_view scores_number,
                std::optional<std::string_view> isa) {
  const Checked checked = check_score(q, q_number, keys, num_keys, number, scale, scores, scores_number);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  self.score_rows(chosen, checked.form, checked.calls);
}

std::uint64_t bind_ask(ScoreThread& self, const ConstBytes<3>& q, std::string_view q_number,
                       const std::vector<ConstBytes<3>>& keys, const std::vector<std::size_t>& num_keys,
                       std::string_view number, float scale, const Bytes<1>& scores, std::string_view scores_number,
                       const std::optional<Array<const std::int32_t, 1>>& word) {
  Checked checked = check_score(q, q_number, keys, num_keys, number, scale, scores, scores_number);
  if (word) AMBIDEX_CHECK(word->shape(0) >= 1, "word: expected one, got none");
  return self.ask({checked.form, std::move(checked.calls), word ? word->data() : nullptr});
}

nb::tuple bind_wait(ScoreThread& self, std::uint64_t number) {
  ScoreThread::Answer answer{};
  {
    nb::gil_scoped_release release;
    answer = self.wait(number);
  }
  return nb::make_tuple(answer.is_answered, answer.begin_s, answer.end_s);
}

void make_thread(ScoreThread* self, ScorePool& pool, double limit_s, double spin_s) {
  using std::chrono::microseconds;
  new (self) ScoreThread(pool, best_isa(), microseconds(static_cast<std::int64_t>(limit_s * 1e6)),
                         microseconds(static_cast<std::int64_t>(spin_s * 1e6)));
}


}  // namespace

void bind_score_rows(nb::module_& m) {
  nb::class_<ScorePool>(m, "ScorePool")
      .def(nb::init<ThreadPool&>(), "threads"_a, nb::keep_alive<1, 2>())
      .def("score_rows", &bind_score, "q"_a.noconvert(), "q_number"_a, "keys"_a, "num_keys"_a, "number"_a, "scale"_a,
           "scores"_a.noconvert(), "scores_number"_a, nb::kw_only(), "isa"_a = nb::none());
  nb::class_<ScoreThread>(m, "ScoreThread")
      .def("__init__", &make_thread, "pool"_a, "limit_s"_a, "spin_s"_a, nb::keep_alive<1, 2>())
      .def("ask", &bind_ask, "q"_a.noconvert(), "q_number"_a, "keys"_a, "num_keys"_a, "number"_a, "scale"_a,
           "scores"_a.noconvert(), "scores_number"_a, "word"_a.noconvert().none())
      .def("wait", &bind_wait, "number"_a);
}

}  // namespace ambidex
