// The kernel that reads rows of logits, declared as those of kernels.h.
#pragma once

#include <cstdint>

#include "isa.h"
#include "kernels.h"

namespace vllm_cpu {

struct RankedReadingsArgs : TokenReadingsArgs {  // `columns` is null unless greedy or num_topk
  bool greedy;       // each row's first column is its argmax
  bool ranked;       // else ranks are 0
  int64_t num_topk;  // so many columns after the first are the row's greatest logits, in order
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_READING_KERNELS(ISA)              \
  namespace vllm_cpu {                                 \
  namespace ISA {                                      \
  void ranked_readings(const RankedReadingsArgs& args); \
  }                                                    \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_READING_KERNELS)
