// A check that throws: what was expected, the values got, and the place. It never aborts.
#pragma once

#include <sstream>
#include <stdexcept>

namespace ambidex {

template <class... Parts>
[[noreturn]] void throw_check(const char* expression, const char* file, int line, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  message << " [" << expression << " at " << file << ":" << line << "]";
  throw std::invalid_argument(message.str());  // ValueError in Python
}

}  // namespace ambidex

// AMBIDEX_CHECK(rows == 3, "rows: expected 3, got ", rows);
#define AMBIDEX_CHECK(condition, ...)                                                       \
  do {                                                                                      \
    if (!(condition)) ::ambidex::throw_check(#condition, __FILE__, __LINE__, __VA_ARGS__);  \
  } while (false)
