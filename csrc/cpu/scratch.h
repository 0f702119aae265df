// Working memory and loop helpers of the kernels, one copy a level like vec.h.
#pragma once

#include <cstdint>
#include <cstddef>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace vllm_cpu {
namespace VLLM_ISA {

inline int64_t max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

inline int64_t this_thread() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory that is not constructed, aligned to a cache line. A std::vector's code would be shared between levels.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(size > 0 ? size : 1) * sizeof(T), kAlign))) {}
  ~Scratch() { ::operator delete(data_, kAlign); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr std::align_val_t kAlign{64};
  T* data_;
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
