// Memory that begins with a cache line, kept from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ambidex {

constexpr std::size_t kLineBytes = 64;

template <class T>
class AlignedArray {
 public:
  // Room for `num`; what was there is lost if there was not.
  void reserve(std::size_t num) {
    if (num <= num_) return;
    bytes_.reset(new char[num * sizeof(T) + kLineBytes]);
    num_ = num;
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.get());
    data_ = reinterpret_cast<T*>(bytes_.get() + (kLineBytes - address % kLineBytes) % kLineBytes);
  }
  T* data() const { return data_; }

 private:
  std::unique_ptr<char[]> bytes_;
  T* data_ = nullptr;
  std::size_t num_ = 0;
};

}  // namespace ambidex
