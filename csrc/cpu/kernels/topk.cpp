// The k greatest logits of each row; see topk_row.h.
#include "../topk_row.h"

namespace vllm_cpu {
namespace VLLM_ISA {

void topk(const TopkArgs& a) {
  if (a.k == 0) return;
#pragma omp parallel
  {
    const RowScratch scratch(a.k > kFewBest ? a.logits.vocab : 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.logits.rows; ++row) {
      best_of_row(a.logits, row, a.k, scratch, a.values + row * a.k, a.ids + row * a.k);
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
