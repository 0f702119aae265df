// Products of bfloat16 in matrix tiles with a weight in pairs (see pair_product.h): 16 rows of a panel's half, one behind the
// other, are a right tile as they lie there. Each output adds up tiles of 32 values of k in order, whatever the number of
// rows: a row's results do not depend on the other rows of the batch.
//
// Include only from kernels/*.cpp.
#pragma once

#include "gemm.h"
#include "tile_lanes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Tiles 0 to 3 are sums: of two of rows by two of columns, or of one of rows by those of two panels; 4 and 5 rows of x, 6 and 7
// columns of weights. Of three of rows 4 and 5 are sums, too, 6 columns and 7 rows. The calling thread's tiles have these
// shapes for `rows` until it changes or releases them.
class RowTiles {
 public:
  // Rows of x are of `bytes`, four in each of a weight's rows. Sets tiles 0 to 3 to zero, too.
  void shape(int rows, int64_t bytes = kTileBytes) {
    // Three of rows are whole ones.
    if (rows > 2 * kTileRows) rows = 2 * kTileRows;
    if (rows == rows_ && bytes == bytes_) return zero();
    rows_ = rows;
    bytes_ = bytes;
    const int upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
    TileShapes shapes;
    shapes.set(0, upper);
    shapes.set(1, upper);
    // One tile of rows leaves two of sums for another panel.
    shapes.set(2, lower > 0 ? lower : upper);
    shapes.set(3, lower > 0 ? lower : upper);
    shapes.set(4, upper, bytes);
    shapes.set(5, lower > 0 ? lower : upper, bytes);
    shapes.set(6, bytes / 4);
    shapes.set(7, bytes / 4);
    configure_tiles(shapes);
  }
  void release() {
    rows_ = 0;
    release_tiles();
  }

  static void zero() {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }

 private:
  int rows_ = 0;
  int64_t bytes_ = 0;
};

// sums [panels][rows][2] of `rows` packed rows of x [ceil(inner / 32)][rows][32] times one panel or, of up to 16 rows, two; rows
// are up to 32, or 48. panel_at(p, step) is where panel p has its values of k from 32 * step on: [16][32][2].
template <int P, typename Panel, typename Next>
[[gnu::always_inline]] inline void multiply_row_tiles(RowTiles& tiles, const BF16* x, int rows, int64_t inner,
                                                      const Panel& panel_at, const Next& next, Vec* sums) {
  constexpr int64_t kPairRow = kPanel * 2 * sizeof(BF16), kHalf = kPanel, kSumsRow = 2 * sizeof(Vec);
  constexpr int64_t kTile = kTileRows * kTileInner;
  tiles.shape(rows);
  const int64_t steps = (inner + kTileInner - 1) / kTileInner;
  const bool two = rows > kTileRows, three = rows > 2 * kTileRows;
  if (P == 1 && three) {
    zero_tile<4>();
    zero_tile<5>();
    for (int64_t step = 0; step < steps; ++step, x += rows * kTileInner) {
      next();
      const BF16* panel = panel_at(0, step);
      // Two of the seven loads find their rows in the first-level cache.
      load_tile<6>(panel, kPairRow);
      load_tile<7>(x, kTileBytes);
      add_bf16_products<0, 7, 6>();
      load_tile<7>(x + kTile, kTileBytes);
      add_bf16_products<2, 7, 6>();
      load_tile<7>(x + 2 * kTile, kTileBytes);
      add_bf16_products<4, 7, 6>();
      load_tile<6>(panel + kHalf, kPairRow);
      add_bf16_products<5, 7, 6>();
      load_tile<7>(x + kTile, kTileBytes);
      add_bf16_products<3, 7, 6>();
      load_tile<7>(x, kTileBytes);
      add_bf16_products<1, 7, 6>();
    }
  } else {
    for (int64_t step = 0; step < steps; ++step, x += rows * kTileInner) {
      next();
      const BF16* panel = panel_at(0, step);
      load_tile<4>(x, kTileBytes);
      load_tile<6>(panel, kPairRow);
      add_bf16_products<0, 4, 6>();
      load_tile<7>(panel + kHalf, kPairRow);
      add_bf16_products<1, 4, 7>();
      if constexpr (P == 2) {
        const BF16* second = panel_at(1, step);
        load_tile<6>(second, kPairRow);
        add_bf16_products<2, 4, 6>();
        load_tile<7>(second + kHalf, kPairRow);
        add_bf16_products<3, 4, 7>();
      } else if (two) {
        load_tile<5>(x + kTile, kTileBytes);
        add_bf16_products<2, 5, 6>();
        add_bf16_products<3, 5, 7>();
      }
    }
  }
  store_tile<0>(sums, kSumsRow);
  store_tile<1>(sums + 1, kSumsRow);
  if (P == 2 || two) {
    Vec* more = sums + 2 * (P == 2 ? rows : kTileRows);
    store_tile<2>(more, kSumsRow);
    store_tile<3>(more + 1, kSumsRow);
  }
  if (P == 1 && three) {
    store_tile<4>(sums + 4 * kTileRows, kSumsRow);
    store_tile<5>(sums + 4 * kTileRows + 1, kSumsRow);
  }
}

// Finishes and writes a tile's sums a few rows at a time, while the matrix unit multiplies the thread's next one: all before that
// one's sums take their place.
class TileWriter {
 public:
  static constexpr int kMostSums = 3 * kTileRows * 2;

  // Where the next tile's sums go.
  Vec* sums() { return sums_; }

  // These are there now: [panels][rows][2].
  void add(const LinearArgs& a, int rows, int panels, int64_t row, int64_t panel) {
    args_ = &a;
    rows_ = rows;
    row_ = row;
    panel_ = panel;
    at_ = done_ = 0;
    left_ = rows * panels;
    within_ = a.adapted.b == nullptr && !(a.gated && a.float_out) && (panel + panels) * (a.gated ? kPanel / 2 : kPanel) <= a.out_columns;
  }

  int left() const { return left_; }

  // Few rows at a time: a call of write_rows for each would take about as long as they do.
  void write(int count) {
    for (count = count < left_ ? count : left_; count > 0;) {
      const int some = count < rows_ - at_ ? count : rows_ - at_;
      Vec* sums = sums_ + 2 * (done_ + at_);
      if (within_ && args_->gated) {
        write_within<BF16, true, false, 1>(*args_, sums, some, row_ + at_, panel_, 0);
      } else if (within_ && args_->float_out) {
        write_within<BF16, false, true, 1>(*args_, sums, some, row_ + at_, panel_, 0);
      } else if (within_) {
        write_within<BF16, false, false, 1>(*args_, sums, some, row_ + at_, panel_, 0);
      } else {
        write_rows<BF16, 1>(*args_, sums, some, row_ + at_, panel_, 0);
      }
      left_ -= some;
      count -= some;
      at_ += some;
      if (at_ < rows_) continue;
      at_ = 0;
      done_ += rows_;
      ++panel_;
    }
  }

 private:
  Vec sums_[kMostSums];
  const LinearArgs* args_ = nullptr;
  int64_t row_ = 0, panel_ = 0;
  int rows_ = 0, at_ = 0, done_ = 0, left_ = 0;
  bool within_ = false;
};

struct TileThread {
  RowTiles tiles;
  TileWriter writer;
};
inline TileThread& tile_thread() {
  static thread_local TileThread thread;
  return thread;
}
inline RowTiles& row_tiles() { return tile_thread().tiles; }

struct TileProduct {
  using Row = BF16;
  using Element = BF16;
  static constexpr int kMaxRows = 3 * kTileRows;
  // CPUs with tiles have 2 MiB for each core: these, and the panels that are fetched ahead.
  static constexpr int64_t kBlockBytes = 1280 * 1024, kPanelBytes = 256 * 1024, kStreamedBytes = 16 * 1024 * 1024;

  static constexpr int panels_at_once(int rows) { return rows <= kTileRows ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) { return a.inner * kPanel * static_cast<int64_t>(sizeof(BF16)); }
  static int64_t packed_row(const LinearArgs& a) { return (a.inner + kTileInner - 1) / kTileInner * kTileInner; }

  // [ceil(K / 32)][rows][32], filled up with zeros.
  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, BF16* out) {
    BF16* to = out + r * kTileInner;
    int64_t k = 0;
    for (; k + kTileInner <= a.inner; k += kTileInner, to += rows * kTileInner) std::memcpy(to, x + k, kTileBytes);
    if (k == a.inner) return;
    std::memset(to, 0, kTileBytes);
    std::memcpy(to, x + k, static_cast<size_t>(a.inner - k) * sizeof(BF16));
  }

  // `rows` packed rows times P panels, into args.out.
  template <int P>
  static void multiply_rows(const LinearArgs& a, const BF16* x, int rows, int64_t row, int64_t panel, AheadOfTiles ahead) {
    const int64_t size = a.inner * kPanel, whole = a.inner / kTileInner;
    const BF16* weight = static_cast<const BF16*>(a.weight) + panel * size;
    // Behind a panel's last values are another's: of what fills up its last tile zeros have to be made.
    alignas(64) BF16 last[P][kTileInner * kPanel];
    if (const int64_t left = a.inner - whole * kTileInner; left > 0) {
      for (int p = 0; p < P; ++p) {
        std::memset(last[p], 0, sizeof(last[p]));
        std::memcpy(last[p], weight + p * size + whole * kTileInner * kPanel, static_cast<size_t>(left * kPanel) * sizeof(BF16));
      }
    }
    TileThread& thread = *reinterpret_cast<TileThread*>(a.prepared);
    TileWriter& writer = thread.writer;
    const int steps = static_cast<int>((a.inner + kTileInner - 1) / kTileInner), share = (writer.left() + steps - 1) / steps;
    multiply_row_tiles<P>(
        thread.tiles, x, rows, a.inner,
        [&](int p, int64_t step) VLLM_INLINE {
          return step == whole ? last[p] : weight + p * size + step * kTileInner * kPanel;
        },
        [&]() VLLM_INLINE {
          ahead(P * kTileInner / kRun);
          writer.write(share);
        },
        writer.sums());
    writer.add(a, rows, P, row, panel);
  }

  static float* begin() { return reinterpret_cast<float*>(&tile_thread()); }
  // After a thread's last product.
  static void finish() {
    TileThread& thread = tile_thread();
    thread.tiles.release();
    thread.writer.write(thread.writer.left());
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
