// linear_quantized of bfloat16 by matrix tiles (see PairsTileProduct). Other rows, and weights whose values are not bfloat16,
// are multiplied as on the levels below.
#include "../tile_pairs.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

void linear_quantized(const LinearArgs& a) {
  if (a.dtype != DType::bf16 || !has_bfloat16_values(a.quant)) return avx512_fp16::linear_quantized(a);
  LinearArgs own = a;
  own.quant.zero_in_codes = own.quant.bits <= 6;
  Gemm<PairsTileProduct>::run(own);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
