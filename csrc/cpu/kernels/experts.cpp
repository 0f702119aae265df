// A mixture of experts: of each token the weighted sum of what its experts' MLPs make of it.
//
// Choices are sorted by expert once; an expert's rows are then multiplied together. The first products are shared out over
// threads by parts of an expert's rows and of its panels, about equally large, and what is between the products is done to a
// part while it is in the cache. The second products are shared out by tokens and panels: a thread takes all experts, one
// after the other, so that a token's sum has one order and no two threads add to it. Products are those of the linear kernels
// (see gemm.h), each by one thread: a row's results do not depend on the others, nor on how the work was shared out.
#include "../gelu.h"
#include "../kernels_experts.h"
#include "../scratch.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kColumns = 32;
// Gates are half of a panel of the first product.
constexpr int64_t kGates = kColumns / 2;
// So many rows of an expert are multiplied together: as many as share a panel well, and stay in the second-level cache.
constexpr int64_t kMostRows = 112, kLeastRows = 28, kRowsBytes = 512 * 1024;
// Float32 results wait in the second-level cache for the next operation.
constexpr int64_t kResultsBytes = 512 * 1024;
// The sums of tokens that a thread is at take so much.
constexpr int64_t kSumsBytes = 1024 * 1024;
// An expert's rows that are not cut by tokens in the second product.
constexpr int64_t kTogether = 64;
// All that is between the products takes at most this: tokens with more are taken in turns.
constexpr int64_t kInnerBytes = 32 * 1024 * 1024;
// Fetching a panel takes the time of so many rows.
constexpr int64_t kPanelRows = 12;
constexpr int64_t kPartsPerThread = 4;

inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Rows and panels of one expert's first product.
struct Part {
  int64_t expert, row, rows, panel, panels;
};

// How the second products are shared out: each in so many parts.
struct Cut {
  int64_t tokens, panels;
};

template <typename T>
class Mixture {
 public:
  // The mixture of tokens [begin, end).
  Mixture(const ExpertsArgs& a, int64_t begin, int64_t end)
      : a_(a), begin_(begin), tokens_(end - begin), starts_(a.num_experts + 1), places_(tokens_ * a.top_k), ids_(tokens_ * a.top_k) {
    sort();
  }

  void compute() {
    const int64_t rows = starts_[a_.num_experts];
    const Scratch<T> inner(rows * a_.inner);
    inner_ = inner.get();
    const int64_t count = cut_first(nullptr);
    const Scratch<Part> parts(count);
    cut_first(parts.get());
    const Cut cut = cut_second();
    const int64_t floats = most(first_floats(parts.get(), count), second_floats(cut));
#pragma omp parallel if (rows * a_.inner * a_.width > 65536)
    {
      const Scratch<T> x(a_.weigh_inputs ? most_rows() * a_.width : 0);
      const Scratch<float> results(floats);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < count; ++i) multiply_first(parts[i], x.get(), results.get());
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t i = 0; i < cut.tokens * cut.panels; ++i) {
        multiply_second(cut, i % cut.tokens, i / cut.tokens, results.get());
      }
    }
  }

 private:
  const ExpertsArgs& a_;
  const int64_t begin_, tokens_;
  const Scratch<int64_t> starts_;  // [num_experts + 1]: where each expert's rows begin
  const Scratch<int32_t> places_;  // of each row, its place among the tokens' choices
  const Scratch<int32_t> ids_;     // of each row, its token
  T* inner_ = nullptr;             // [rows, inner]

  int64_t first_panels() const { return parts_of(a_.inner, a_.gated ? kGates : kColumns); }
  int64_t second_panels() const { return parts_of(a_.width, kColumns); }
  int64_t most_rows() const {
    return least(kMostRows, most(kLeastRows, kRowsBytes / (a_.width * static_cast<int64_t>(sizeof(T)))));
  }
  // The second products' rows, which are narrower, as well.
  int64_t blocks_of(int64_t rows) const { return parts_of(rows, most_rows()); }

  // Calls f(place, expert) for each choice of this rank's experts, in order.
  template <typename Id, typename F>
  void for_each_choice(const Id* ids, const F& f) const {
    ids += begin_ * a_.top_k;
    for (int64_t place = 0; place < tokens_ * a_.top_k; ++place) {
      const int64_t expert = static_cast<int64_t>(ids[place]) - a_.first_expert;
      if (expert >= 0 && expert < a_.num_experts) f(place, expert);
    }
  }
  template <typename F>
  void for_each_choice(const F& f) const {
    a_.ids_int64 != nullptr ? for_each_choice(a_.ids_int64, f) : for_each_choice(a_.ids_int32, f);
  }

  void sort() {
    for (int64_t e = 0; e <= a_.num_experts; ++e) starts_[e] = 0;
    for_each_choice([&](int64_t, int64_t expert) { ++starts_[expert + 1]; });
    for (int64_t e = 0; e < a_.num_experts; ++e) starts_[e + 1] += starts_[e];
    const Scratch<int64_t> next(a_.num_experts);
    for (int64_t e = 0; e < a_.num_experts; ++e) next[e] = starts_[e];
    for_each_choice([&](int64_t place, int64_t expert) {
      const int64_t row = next[expert]++;
      places_[row] = static_cast<int32_t>(place);
      ids_[row] = static_cast<int32_t>(place / a_.top_k);
    });
  }

  // The first row of an expert whose token is `token` or a later one.
  int64_t first_row(int64_t expert, int64_t token) const {
    int64_t low = starts_[expert], high = starts_[expert + 1];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ids_[middle] < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // silu of a gate is in the products themselves.
  bool is_fused() const {
    return a_.gated && a_.curve == Curve::silu && a_.slope == 1 && a_.offset == 0 && a_.limit == __builtin_inff();
  }

  // Writes the first products' parts, unless `parts` is null; returns how many there are.
  int64_t cut_first(Part* parts) const {
    const int64_t panels = first_panels(), threads = max_threads();
    int64_t work = 0;
    for (int64_t e = 0; e < a_.num_experts; ++e) {
      const int64_t rows = starts_[e + 1] - starts_[e];
      work += rows + blocks_of(rows) * kPanelRows;
    }
    const int64_t fair = most(1, work * panels / (threads * kPartsPerThread));
    int64_t count = 0;
    for (int64_t e = 0; e < a_.num_experts; ++e) {
      const int64_t begin = starts_[e], all = starts_[e + 1] - begin, blocks = blocks_of(all);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = begin + all * b / blocks, rows = begin + all * (b + 1) / blocks - row;
        int64_t pieces = threads == 1 ? 1 : parts_of((rows + kPanelRows) * panels, fair);
        if (!is_fused()) pieces = most(pieces, parts_of(rows * panels * kColumns * int64_t{sizeof(float)}, kResultsBytes));
        pieces = least(pieces, panels);
        for (int64_t p = 0; p < pieces; ++p, ++count) {
          const int64_t panel = panels * p / pieces;
          if (parts != nullptr) parts[count] = {e, row, rows, panel, panels * (p + 1) / pieces - panel};
        }
      }
    }
    return count;
  }

  int64_t first_floats(const Part* parts, int64_t count) const {
    int64_t floats = 0;
    for (int64_t i = 0; i < count && !is_fused(); ++i) floats = most(floats, parts[i].rows * parts[i].panels * kColumns);
    return floats;
  }

  // By tokens as long as that leaves an expert's rows together, then by panels.
  Cut cut_second() const {
    int64_t active = 0;
    for (int64_t e = 0; e < a_.num_experts; ++e) active += starts_[e + 1] > starts_[e];
    const int64_t wanted = max_threads() * kPartsPerThread;
    const int64_t panels = second_panels();
    Cut cut;
    cut.tokens = most(1, least(wanted, starts_[a_.num_experts] / most(1, active * kTogether)));
    cut.panels = least(panels, parts_of(wanted, cut.tokens));
    // So that their sums stay in the cache.
    const int64_t most_sums = kSumsBytes / (kColumns * int64_t{sizeof(float)});
    while (cut.panels < panels && parts_of(tokens_, cut.tokens) * parts_of(panels, cut.panels) > most_sums) ++cut.panels;
    return cut;
  }

  // The floats of the tokens' sums and of an expert's results.
  int64_t second_floats(const Cut& cut) const {
    const int64_t rows = parts_of(tokens_, cut.tokens) + most_rows();
    return rows * parts_of(second_panels(), cut.panels) * kColumns;
  }

  // The product with some panels of an expert's weight.
  LinearArgs with_panels(const ExpertProduct& product, int64_t panel, int64_t panels) const {
    LinearArgs args = product.args;
    const int64_t column = panel * kColumns;
    args.dtype = a_.dtype;
    args.alone = true;
    args.weight = static_cast<const char*>(args.weight) + panel * product.panel_bytes;
    if (args.scales != nullptr) args.scales += column;
    if (args.bias != nullptr) args.bias = static_cast<const T*>(args.bias) + column;
    if (args.quant.sparse_starts != nullptr) args.quant.sparse_starts += column;
    args.columns = args.out_columns = least(panels * kColumns, args.columns - column);
    return args;
  }

  void multiply(const ExpertProduct& product, const LinearArgs& args) const {
    a_.kernels[static_cast<int>(product.kind)](args);
  }

  // Take the inputs of an expert's rows, into memory `x` if they are weighed.
  void take_rows(const Part& part, LinearArgs& args, T* x) const {
    const T* hidden = static_cast<const T*>(a_.hidden) + begin_ * a_.hidden_stride;
    args.rows = part.rows;
    if (!a_.weigh_inputs) {
      args.x = hidden;
      args.x_stride = a_.hidden_stride;
      args.row_ids = ids_.get() + part.row;
      return;
    }
    args.x = x;
    args.x_stride = a_.width;
    for (int64_t row = part.row; row < part.row + part.rows; ++row, x += a_.width) {
      const T* from = hidden + ids_[row] * a_.hidden_stride;
      const Vec weight = set1(weight_of(row));
      for (int64_t i = 0; i < a_.width; i += kLanes) {
        const int n = static_cast<int>(least(kLanes, a_.width - i));
        store_n(x + i, load_n(from + i, n) * weight, n);
      }
    }
  }

  float weight_of(int64_t row) const { return a_.weights[begin_ * a_.top_k + places_[row]]; }

  void multiply_first(const Part& part, T* x, float* results) const {
    const ExpertProduct& product = a_.first[part.expert];
    LinearArgs args = with_panels(product, part.panel, part.panels);
    take_rows(part, args, x);
    T* inner = inner_ + part.row * a_.inner;
    if (is_fused()) {
      args.gated = true;
      args.out_columns = least(part.panels * kGates, a_.inner - part.panel * kGates);
      args.out = inner + part.panel * kGates;
      args.out_stride = a_.inner;
      multiply(product, args);
      return;
    }
    args.float_out = true;
    args.out = results;
    args.out_stride = part.panels * kColumns;
    multiply(product, args);
    activate(part, results, inner);
  }

  void activate(const Part& part, const float* results, T* inner) const {
    switch (a_.curve) {
      case Curve::silu:
        return activate_by(part, results, inner, [slope = a_.slope](Vec x) VLLM_INLINE {
          return slope == 1 ? silu(x) : silu(x * set1(slope)) * set1(1 / slope);
        });
      case Curve::gelu_tanh:
        return activate_by(part, results, inner, [](Vec x) VLLM_INLINE { return gelu_tanh(x); });
      case Curve::gelu:
        return activate_by(part, results, inner, [](Vec x) VLLM_INLINE { return gelu(x); });
      case Curve::relu:
        return activate_by(part, results, inner, [](Vec x) VLLM_INLINE { return max(zero(), x); });
      case Curve::relu2:
        return activate_by(part, results, inner, [](Vec x) VLLM_INLINE { return max(zero(), x) * max(zero(), x); });
      case Curve::quick_gelu:
        return activate_by(part, results, inner,
                           [](Vec x) VLLM_INLINE { return silu(x * set1(1.702f)) * set1(1.0f / 1.702f); });
      default:
        return;  // refused by the binding
    }
  }

  template <typename F>
  [[gnu::noinline]] void activate_by(const Part& part, const float* results, T* inner, const F& curve) const {
    const int64_t width = a_.gated ? kGates : kColumns;
    // The operands' order lets NaN pass.
    const Vec limit = set1(a_.limit), floor = set1(-a_.limit), offset = set1(a_.offset);
    for (int64_t r = 0; r < part.rows; ++r, inner += a_.inner) {
      for (int64_t panel = part.panel; panel < part.panel + part.panels; ++panel, results += kColumns) {
        const int64_t begin = panel * width, end = least(begin + width, a_.inner);
        for (int64_t i = begin; i < end; i += kLanes) {
          const float* at = results + (i - begin);
          Vec value = curve(a_.gated ? min(limit, load(at)) : load(at));
          if (a_.gated) value = value * (min(limit, max(floor, load(at + kGates))) + offset);
          store_n(inner + i, value, static_cast<int>(least(kLanes, end - i)));
        }
      }
    }
  }

  void multiply_second(const Cut& cut, int64_t t, int64_t p, float* results) const {
    const int64_t first = tokens_ * t / cut.tokens, last = tokens_ * (t + 1) / cut.tokens;
    const int64_t panel = second_panels() * p / cut.panels, panels = second_panels() * (p + 1) / cut.panels - panel;
    const int64_t columns = panels * kColumns;
    float* sums = results + most_rows() * columns;
    for (int64_t i = 0; i < (last - first) * columns; i += kLanes) store(sums + i, zero());
    for (int64_t e = 0; e < a_.num_experts; ++e) {
      if (starts_[e] == starts_[e + 1]) continue;
      const int64_t begin = first_row(e, first), all = first_row(e, last) - begin;
      if (all == 0) continue;
      LinearArgs args = with_panels(a_.second[e], panel, panels);
      args.x_stride = a_.inner;
      args.float_out = true;
      args.out = results;
      args.out_stride = columns;
      for (int64_t b = 0, blocks = blocks_of(all); b < blocks; ++b) {
        const int64_t row = begin + all * b / blocks;
        args.x = inner_ + row * a_.inner;
        args.rows = begin + all * (b + 1) / blocks - row;
        multiply(a_.second[e], args);
        for (int64_t r = 0; r < args.rows; ++r) add(row + r, results + r * columns, columns, first, sums);
      }
    }
    write(first, last, panel, columns, sums);
  }

  // The results of a row, to its token's sum.
  void add(int64_t row, const float* results, int64_t columns, int64_t first, float* sums) const {
    const Vec weight = set1(a_.weigh_inputs ? 1.0f : weight_of(row));
    float* sum = sums + (ids_[row] - first) * columns;
    for (int64_t i = 0; i < columns; i += kLanes) store(sum + i, fma(load(results + i), weight, load(sum + i)));
  }

  void write(int64_t first, int64_t last, int64_t panel, int64_t columns, const float* sums) const {
    const int64_t count = least(columns, a_.width - panel * kColumns);
    for (int64_t token = first; token < last; ++token, sums += columns) {
      T* out = static_cast<T*>(a_.out) + (begin_ + token) * a_.width + panel * kColumns;
      for (int64_t i = 0; i < count; i += kLanes) {
        store_n(out + i, load(sums + i), static_cast<int>(least(kLanes, count - i)));
      }
    }
  }
};

template <typename T>
void run(const ExpertsArgs& a) {
  const int64_t token_bytes = most(1, a.top_k * a.inner * static_cast<int64_t>(sizeof(T)));
  const int64_t turns = parts_of(a.tokens, most(1, kInnerBytes / token_bytes));
  for (int64_t turn = 0; turn < turns; ++turn) {
    Mixture<T>(a, a.tokens * turn / turns, a.tokens * (turn + 1) / turns).compute();
  }
}

}  // namespace

void experts(const ExpertsArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, run<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
