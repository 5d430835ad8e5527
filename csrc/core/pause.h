// A hint to the processor that this thread spins.
#pragma once

namespace ambidex {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace ambidex
