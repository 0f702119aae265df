// linear of bfloat16 with a weight in pairs by matrix tiles (see TileProduct). Other weights are multiplied as on the levels
// below.
#include "../tile_product.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

void linear(const LinearArgs& a) {
  if (!a.pairs) return avx512_fp16::linear(a);
  Gemm<TileProduct>::run(a);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
