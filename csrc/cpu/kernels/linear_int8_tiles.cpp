// linear_int8 by matrix tiles (see Int8TileProduct).
#include "../tile_int8.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

void linear_int8(const LinearArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, Gemm<Int8TileProduct<scalar_t>>::run(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
