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

// The number of threads of the parallel region that this is in.
inline int64_t num_threads() {
#ifdef _OPENMP
  return omp_get_num_threads();
#else
  return 1;
#endif
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory that is not constructed, aligned to a cache line. A std::vector's code would be shared between levels.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : data_(size > 0 ? static_cast<T*>(::operator new(static_cast<size_t>(size) * sizeof(T), kAlign)) : nullptr) {}
  ~Scratch() { ::operator delete(data_, kAlign); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr std::align_val_t kAlign{64};
  T* data_;
};

// Parts of some work, shared out among threads: each takes its own ones first, in order, whose memory it is likely to have
// in its cache from the operator before; then what another has left, since another process may have taken that one's core.
class Shares {
 public:
  explicit Shares(int64_t parts) : parts_(parts), threads_(max_threads()), next_(threads_) {
    for (int64_t thread = 0; thread < threads_; ++thread) next_[thread] = parts * thread / threads_;
  }

  // The next part for the calling thread, or `parts` when none is left. `turn` is the thread's, 0 at first.
  int64_t claim(int64_t* turn) {
    for (; *turn < threads_; ++*turn) {
      const int64_t owner = (this_thread() + *turn) % threads_;
      int64_t part;
#pragma omp atomic capture
      part = next_[owner]++;
      if (part < parts_ * (owner + 1) / threads_) return part;
    }
    return parts_;
  }

 private:
  const int64_t parts_, threads_;
  Scratch<int64_t> next_;
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
