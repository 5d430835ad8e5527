#include "ops/read.h"

#include <atomic>
#include <mutex>

#include "simd/call.h"

namespace ambidex {

// Defined in read-inl.h.
namespace generic {
std::uint64_t read_bytes(const char* bytes, std::size_t num_bytes);
}
namespace avx2 {
std::uint64_t read_bytes(const char* bytes, std::size_t num_bytes);
}
namespace avx512 {
std::uint64_t read_bytes(const char* bytes, std::size_t num_bytes);
}
namespace avx512bf16 {
std::uint64_t read_bytes(const char* bytes, std::size_t num_bytes);
}
namespace amx {
std::uint64_t read_bytes(const char* bytes, std::size_t num_bytes);
}

static std::uint64_t read_bytes(Isa isa, const char* bytes, std::size_t num_bytes) {
  AMBIDEX_CALL(isa, read_bytes, bytes, num_bytes);
}

std::uint64_t read_all(Isa isa, ThreadPool& threads, const char* bytes, std::size_t num_bytes) {
  std::lock_guard<std::mutex> lock(threads.mutex());
  struct Context {
    Isa isa;
    const char* bytes;
    std::size_t num_bytes, num_threads;
    std::atomic<std::uint64_t> total;
  } context{isa, bytes, num_bytes, threads.num_threads(), {0}};
  threads.run(
      [](void* pointer, std::size_t thread) {
        auto& c = *static_cast<Context*>(pointer);
        const std::size_t begin = c.num_bytes / 64 * thread / c.num_threads * 64;
        const std::size_t end =
            thread + 1 == c.num_threads ? c.num_bytes : c.num_bytes / 64 * (thread + 1) / c.num_threads * 64;
        c.total += read_bytes(c.isa, c.bytes + begin, end - begin);
      },
      &context);
  return context.total;
}

}  // namespace ambidex
