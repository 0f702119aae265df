// linear of bfloat16 with scaled float16 weights in float16 arithmetic (see HalfProduct). Other levels, and other weights,
// take linear, and so do rows that would be lost in sums of float16.
#include "../half_product.h"

#if defined(VLLM_HAS_HALF_LANES)
namespace vllm_cpu {
namespace VLLM_ISA {

void linear(const LinearArgs& a) {
  if (a.scales == nullptr) return avx512_bf16::linear(a);
  multiply_or_leave<HalfProduct>(a, &avx512_bf16::linear);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
