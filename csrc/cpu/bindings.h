// Every bindings_*.cpp needs these: argument checks that name the tensor, and plain views of tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>

#include "dtype.h"
#include "kernels.h"

namespace vllm_cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
  return DType::f32;
}

template <typename T>
inline T* data_of(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType dtype, const char* wanted) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " must have dtype ", wanted);
}

inline void check_same_dtype(const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, " must have the dtype of ", like_name);
}

// Whether the weight of a norm is float32; else it has the dtype of x.
inline bool check_norm_weight_dtype(const Tensor& weight, const char* name, const Tensor& x) {
  if (weight.scalar_type() == ScalarType::Float) return true;
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), name, " must be float32 or have the dtype of x");
  return false;
}

// Checks the sizes; -1 stands for any.
inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(sizes.size()), name, " must have ", sizes.size(),
                  " dimensions, got ", t.dim());
  int64_t i = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size < 0 || t.size(i) == size, name, " must have size ", size, " in dimension ", i,
                    ", got ", t.size(i));
    ++i;
  }
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

// A dimension of size 1 may have any stride.
inline void check_last_contiguous(const Tensor& t, const char* name) {
  const int64_t last = t.dim() - 1;
  STD_TORCH_CHECK(t.size(last) <= 1 || t.stride(last) == 1, name, " must be contiguous in its last dimension");
}

inline bool is_int64(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, name, " must be int32 or int64");
  return type == ScalarType::Long;
}

// Points at a row of `size` numbers of either integer type, and leaves the other pointer null.
inline void read_integers(const Tensor& t, const char* name, int64_t size, const int64_t** int64, const int32_t** int32) {
  check_shape(t, name, {size});
  check_contiguous(t, name);
  if (is_int64(t, name)) {
    *int64 = static_cast<const int64_t*>(t.data_ptr());
  } else {
    *int32 = static_cast<const int32_t*>(t.data_ptr());
  }
}

// [tokens, heads, head_dim], the last dimension contiguous.
inline Heads heads_of(const Tensor& t, const char* name) {
  check_shape(t, name, {-1, -1, -1});
  check_last_contiguous(t, name);
  return {t.data_ptr(), t.size(1), t.stride(0), t.stride(1)};
}

}  // namespace vllm_cpu
