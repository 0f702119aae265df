// The kernel that binds answers to a form, declared as those of kernels.h.
#pragma once

#include <cstdint>

#include "isa.h"

namespace vllm_cpu {

struct KeepBitsArgs {
  float* logits;          // [.., vocab], with rows `stride` apart
  const uint32_t* mask;   // [rows, words], a bit a token, the lowest first
  const int64_t* places;  // [rows], each mask's row of the logits; null = its own index
  int64_t rows, vocab, stride, words;
  int64_t first;  // the token of column 0
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_FORM_KERNELS(ISA)        \
  namespace vllm_cpu {                        \
  namespace ISA {                             \
  void keep_bits(const KeepBitsArgs& args);   \
  }                                           \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_FORM_KERNELS)
