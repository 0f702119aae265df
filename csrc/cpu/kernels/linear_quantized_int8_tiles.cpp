// linear_quantized_int8 by matrix tiles (see BytesTileProduct).
#include "../tile_bytes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

void linear_quantized_int8(const LinearArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, Gemm<BytesTileProduct<scalar_t>>::run(a));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
