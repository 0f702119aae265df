// x W^T + bias with a weight packed once, float32 accumulation whatever the dtype.
//
// A packed weight is a row of panels, each 32 output columns wide: panel [K][32]. In bfloat16 columns c and c + 16
// stand side by side, so that one 64-byte load and two bit operations give both as float32; on Intel's CPUs without
// matrix tiles that beats the bfloat16 dot-product instructions, whose rate is half that of float32 multiply-adds.
//
// Each output is a sum of chains of kChain multiply-adds over k, in order, whichever tile or thread computes it: a
// row's results do not depend on the other rows of the batch. Short chains keep the rounding error small.
#include "../kernels.h"
#include "../vec.h"
#include "../scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int kPanel = 32;
constexpr int kGroups = 16 / kLanes;
constexpr int64_t kChain = 256;
constexpr int kRun = 16;
// Rows of a panel to fetch ahead: what the hardware fetches by itself stops at each page, and weights come from memory.
constexpr int kAhead = 48;
// Rows of a tile times the panel's two vectors, plus operands, fill the register file.
constexpr int kMaxRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
// Packed rows that stay in the second-level cache while all panels pass by.
constexpr int64_t kBlockBytes = 512 * 1024;

// Few rows leave registers free: several panels at once keep enough chains in flight to hide latency.
constexpr int panels_at_once(int rows) {
  return 8 * rows <= 2 * kMaxRows ? 4 : 4 * rows <= 2 * kMaxRows ? 2 : 1;
}

template <typename T>
void store_columns(const LinearArgs& a, const Vec& low, const Vec& high, int64_t row, int64_t column, int group) {
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  const Vec values[2] = {low, high};
  for (int half = 0; half < 2; ++half) {
    const int64_t first = column + half * 16 + group * kLanes;
    const int64_t left = a.columns - first;
    if (left >= kLanes) {
      store(out + first, values[half]);
    } else if (left > 0) {
      store_n(out + first, values[half], static_cast<int>(left));
    }
  }
}

template <typename T>
void add_bias(const LinearArgs& a, Vec* low, Vec* high, int64_t column, int group) {
  const T* bias = static_cast<const T*>(a.bias);
  Vec* values[2] = {low, high};
  for (int half = 0; half < 2; ++half) {
    const int64_t first = column + half * 16 + group * kLanes;
    const int64_t left = a.columns - first;
    if (left > 0) {
      *values[half] = *values[half] + load_n(bias + first, left < kLanes ? static_cast<int>(left) : kLanes);
    }
  }
}

template <typename T>
inline void prefetch_row(const T* row) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (unsigned i = 0; i < kPanel * sizeof(T); i += 64) __builtin_prefetch(bytes + i);
}

// sums[R][P][2] = R rows of packed x times P panels over `inner` values of k, kLanes columns of each half.
template <typename T, int R, int P>
inline void multiply_chain(const float* x, const T* panel, int64_t panel_size, int64_t inner, int group,
                           Vec (&sums)[R][P][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = zero();
  }
  for (; inner > 0; inner -= kRun, x += R * kRun) {
    const int run = static_cast<int>(least(kRun, inner));
    for (int k = 0; k < run; ++k, panel += kPanel) {
      Vec low[P], high[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        if (kGroups == 1 || group == 0) prefetch_row(panel + p * panel_size + kAhead * kPanel);
        load_pair(panel + p * panel_size, group, &low[p], &high[p]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec value = set1(x[r * kRun + k]);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          sums[r][p][0] = fma(value, low[p], sums[r][p][0]);
          sums[r][p][1] = fma(value, high[p], sums[r][p][1]);
        }
      }
    }
  }
}

template <typename T, int R, int P>
inline void multiply(const LinearArgs& a, const float* x, const T* panel, int64_t row, int64_t column, int group) {
  const int64_t panel_size = a.inner * kPanel;
  Vec totals[R][P][2];
  multiply_chain<T, R, P>(x, panel, panel_size, least(kChain, a.inner), group, totals);
  for (int64_t k = kChain; k < a.inner; k += kChain) {
    Vec sums[R][P][2];
    multiply_chain<T, R, P>(x + k * R, panel + k * kPanel, panel_size, least(kChain, a.inner - k), group, sums);
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) {
        totals[r][p][0] = totals[r][p][0] + sums[r][p][0];
        totals[r][p][1] = totals[r][p][1] + sums[r][p][1];
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const int64_t first = column + p * kPanel;
      if (a.bias != nullptr) add_bias<T>(a, &totals[r][p][0], &totals[r][p][1], first, group);
      if (a.float_out) {
        store_columns<float>(a, totals[r][p][0], totals[r][p][1], row + r, first, group);
      } else {
        store_columns<T>(a, totals[r][p][0], totals[r][p][1], row + r, first, group);
      }
    }
  }
}

// A tile of R rows times panels [begin, end).
template <typename T, int R>
void multiply_tile(const LinearArgs& a, const float* x, int64_t row, int64_t begin, int64_t end) {
  constexpr int P = panels_at_once(R);
  const T* weight = static_cast<const T*>(a.weight);
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) {
    for (int group = 0; group < kGroups; ++group) {
      multiply<T, R, P>(a, x, weight + panel * a.inner * kPanel, row, panel * kPanel, group);
    }
  }
  for (; panel < end; ++panel) {
    for (int group = 0; group < kGroups; ++group) {
      multiply<T, R, 1>(a, x, weight + panel * a.inner * kPanel, row, panel * kPanel, group);
    }
  }
}

template <typename T, int R>
struct TileTable {
  static void run(int rows, const LinearArgs& a, const float* x, int64_t row, int64_t begin, int64_t end) {
    if (rows == R) return multiply_tile<T, R>(a, x, row, begin, end);
    TileTable<T, R - 1>::run(rows, a, x, row, begin, end);
  }
};
template <typename T>
struct TileTable<T, 0> {
  static void run(int, const LinearArgs&, const float*, int64_t, int64_t, int64_t) {}
};

inline int64_t padded_inner(const LinearArgs& a) { return (a.inner + kRun - 1) / kRun * kRun; }

// Rows [first, first + rows) of x as floats [ceil(K / kRun)][rows][kRun]: whole vectors to write here, and neighbours
// to read for the product.
template <typename T>
void pack_rows(const LinearArgs& a, int64_t first, int64_t rows, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = static_cast<const T*>(a.x) + (first + r) * a.x_stride;
    for (int64_t k = 0; k < a.inner; k += kRun) {
      float* run = out + k * rows + r * kRun;
      for (int i = 0; i < kRun && k + i < a.inner; i += kLanes) {
        store(run + i, load_n(x + k + i, static_cast<int>(least(kLanes, a.inner - k - i))));
      }
    }
  }
}

// How rows [first, last) fall into tiles of about equal height.
struct Tiles {
  int64_t first, last, count;
  Tiles(int64_t first, int64_t last) : first(first), last(last), count((last - first + kMaxRows - 1) / kMaxRows) {}
  int64_t start(int64_t tile) const { return first + (last - first) * tile / count; }
};

// The tiles' packed rows times panels [begin, end).
template <typename T>
void multiply_block(const LinearArgs& a, const Tiles& tiles, int64_t begin, int64_t end, const float* packed) {
  // A few panels stay in the second-level cache while the tiles pass; small tiles take several at once.
  constexpr int64_t kStep = 4;
  for (int64_t panel = begin; panel < end; panel += kStep) {
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t start = tiles.start(tile);
      TileTable<T, kMaxRows>::run(static_cast<int>(tiles.start(tile + 1) - start), a,
                                  packed + (start - tiles.first) * padded_inner(a), start, panel,
                                  least(panel + kStep, end));
    }
  }
}

// Many rows: each thread takes blocks of them, and all panels.
template <typename T>
void multiply_by_rows(const LinearArgs& a, int64_t block) {
  const int64_t panels = (a.columns + kPanel - 1) / kPanel, threads = max_threads();
  // A whole number of rounds, so that no thread waits for a last block.
  const int64_t blocks = (a.rows + block * threads - 1) / (block * threads) * threads;
#pragma omp parallel
  {
    Scratch<float> packed((a.rows / blocks + 1) * padded_inner(a));
#pragma omp for schedule(dynamic)
    for (int64_t part = 0; part < blocks; ++part) {
      const Tiles tiles(a.rows * part / blocks, a.rows * (part + 1) / blocks);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t start = tiles.start(tile);
        pack_rows<T>(a, start, tiles.start(tile + 1) - start, packed.get() + (start - tiles.first) * padded_inner(a));
      }
      multiply_block<T>(a, tiles, 0, panels, packed.get());
    }
  }
}

// Few rows: all are packed once, by all threads, and the panels are shared out.
template <typename T>
void multiply_by_panels(const LinearArgs& a) {
  const int64_t panels = (a.columns + kPanel - 1) / kPanel;
  const int64_t parts = least(max_threads(), panels);
  const Tiles tiles(0, a.rows);
  Scratch<float> packed(a.rows * padded_inner(a));
#pragma omp parallel if (a.rows * a.columns * a.inner > 65536)
  {
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t start = tiles.start(tile);
      pack_rows<T>(a, start, tiles.start(tile + 1) - start, packed.get() + start * padded_inner(a));
    }
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      multiply_block<T>(a, tiles, panels * part / parts, panels * (part + 1) / parts, packed.get());
    }
  }
}

template <typename T>
void multiply_all(const LinearArgs& a) {
  const int64_t most = kBlockBytes / (padded_inner(a) * 4) / kMaxRows * kMaxRows;
  const int64_t block = most > kMaxRows ? most : kMaxRows;
  if (a.rows >= max_threads() * 4 * kMaxRows) {
    multiply_by_rows<T>(a, block);
  } else {
    multiply_by_panels<T>(a);
  }
}

inline int64_t place(int64_t column, const float*) { return column; }
inline int64_t place(int64_t column, const F16*) { return column; }
inline int64_t place(int64_t column, const BF16*) { return column < 16 ? 2 * column : 2 * (column - 16) + 1; }

template <typename T>
void pack_all(const PackLinearArgs& a) {
  const int64_t panels = (a.columns + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    T* out = static_cast<T*>(a.packed) + panel * a.inner * kPanel;
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t source = panel * kPanel + column;
      const T* weight = static_cast<const T*>(a.weight) + source * a.weight_stride;
      const int64_t at = place(column, out);
      for (int64_t k = 0; k < a.inner; ++k) out[k * kPanel + at] = source < a.columns ? weight[k] : T{};
    }
  }
}

}  // namespace

void pack_linear(const PackLinearArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, pack_all<scalar_t>(a)); }

void linear(const LinearArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, multiply_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
