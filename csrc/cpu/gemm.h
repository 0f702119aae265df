// How a product of many rows with a packed weight is cut into register tiles and shared out over threads. What a tile
// computes is a Product's affair:
//
//   Row, Element            what rows of x and packed rows consist of
//   kMaxRows                rows of the highest tile
//   kPanelsAtATime          panels that stay in the second-level cache while all tiles of a block pass by
//   panels_at_once(rows)    panels that a tile of so many rows takes together
//   packed_row(args)        elements that a packed row takes
//   pack_row(args, x, r, rows, out)            packs the row of x that is the r-th of a tile's `rows`
//   multiply<R, P>(args, x, row, panel, ahead) R packed rows times panels [panel, panel + P), into args.out; calls
//                                              `ahead` with the runs of kRun values of k that it goes on by
//   panel_size(args)        bytes of a panel
//
// and, if its panels are prepared before tiles pass by them, whose results are in args.prepared:
//
//   prepared_size(args)           floats that a thread needs for kPanelsAtATime panels
//   prepare(args, panel, stop)    panels [panel, stop)
//
// and, if that takes long beside a block of rows times them, so that panels are prepared once for all rows:
//
//   panels_at_a_time(args)        in place of kPanelsAtATime: as many as are in memory at once
//
// and, if the second-level cache is larger than most:
//
//   kBlockBytes                   in place of this file's, where that is fewer than kBlockRows packed rows
//   kPanelBytes                   of panels that stay there beside them, in place of kPanelsAtATime
//   kStreamedBytes                in place of this file's
//
// and, if it leaves rows to another product:
//
//   leave_row(args, x, row)       marks row `row`, whose values are x, if it does
//
// and, if it multiplies tiles of any height in one function, in place of multiply:
//
//   multiply_rows<P>(args, x, rows, row, panel, ahead)   `rows` packed rows times P panels, P one of panels_at_once; calls
//                                                        `ahead`, AheadOfTiles, with the runs of each of them
//   finish()                                             after a thread's last product
//
// and, if it needs more of a thread than its panels, whose address takes a call to find:
//
//   begin()   before the thread's first product; will be args.prepared
//
// Include only from kernels/*.cpp.
#pragma once

#include <type_traits>

#include "adapted_rows.h"
#include "kernels.h"
#include "rms_norm_row.h"
#include "scratch.h"
#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kPanel = 32;
// In so many groups of kLanes columns each half of a panel is taken.
constexpr int kGroups = 16 / kLanes;
// Values of k that stand together in packed rows.
constexpr int kRun = 16;
// Packed rows that stay in the second-level cache while all panels pass by.
constexpr int64_t kBlockBytes = 512 * 1024;
// With fewer of them tiles wait for the panels, which come from the third-level cache for each block.
constexpr int64_t kBlockRows = 128;
// Results that outgrow the second-level cache are written past it: fetching each line before it is overwritten took a
// tenth of the time of a product with a vocabulary.
constexpr int64_t kStreamedBytes = 4 * 1024 * 1024;
// Packed rows that panels are prepared for once.
constexpr int64_t kPreparedForBytes = 16 * 1024 * 1024;

inline int64_t num_runs(const LinearArgs& a) { return (a.inner + kRun - 1) / kRun; }

inline int64_t row_of_x(const LinearArgs& a, int64_t row) { return a.row_ids != nullptr ? a.row_ids[row] : row; }

// Rows of one adapter are multiplied side by side: which row the one in this place is.
inline int64_t row_in_place(const LinearArgs& a, int64_t place) {
  return a.adapted.order != nullptr ? a.adapted.order[place] : place;
}

// Fetches what comes next into the second-level cache, a few cache lines at a time.
struct Ahead {
  const char* at;
  int lines;
  void operator()(int runs = 1) {
    for (int i = 0; i < runs * lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// The same for matrix tiles, by parts of a cache line: these are so fast that next panels have to be fetched all the time, and
// what is fetched in vain takes as long as a tile's rows.
struct AheadOfTiles {
  static constexpr int64_t kParts = 64;
  const char* at;
  int64_t parts;  // of a run
  int64_t due = 0;
  void operator()(int64_t runs) {
    for (due += runs * parts; due >= kParts; due -= kParts, at += 64) __builtin_prefetch(at, 0, 2);
  }
  void skip(int64_t runs) {
    due += runs * parts;
    at += due / kParts * 64;
    due %= kParts;
  }
};

template <typename Product>
concept PreparesPanels = requires(const LinearArgs& a) { Product::prepared_size(a); };

template <typename Product>
concept PreparesOnce = requires(const LinearArgs& a) { Product::panels_at_a_time(a); };

template <typename Product>
concept HasLargeCache = requires { Product::kPanelBytes; };

template <typename Product>
concept LeavesRows = requires(const LinearArgs& a, const typename Product::Row* x) { Product::leave_row(a, x, 0); };

template <typename Product>
concept TakesAnyHeight = requires { Product::finish(); };

// A thread's arguments, with its memory.
template <typename Product>
struct ThreadArgs {
  LinearArgs args;
  Scratch<float> prepared;
  explicit ThreadArgs(const LinearArgs& a) : args(a), prepared(size(a)) {
    args.prepared = prepared.get();
    if constexpr (requires { Product::begin(); }) args.prepared = Product::begin();
  }
  ~ThreadArgs() {
    if constexpr (TakesAnyHeight<Product>) Product::finish();
    if (args.streams) finish_streams();
  }
  static int64_t size(const LinearArgs& a) {
    if constexpr (PreparesPanels<Product>) return Product::prepared_size(a);
    return 0;
  }
};

template <typename Product>
class Gemm {
 public:
  static void run(LinearArgs a) {
    const AdaptedMemory<Row> adapted(a);
    if (a.alone) return by_this_thread(a);
    a.streams = kStreamsLines && a.float_out && a.rows * a.out_columns * int64_t{sizeof(float)} >= streamed_bytes() &&
                a.out_stride == a.out_columns && a.out_columns % kLanes == 0 && reinterpret_cast<uintptr_t>(a.out) % 64 == 0;
    if (a.rows < max_threads() * 4 * kMaxRows) {
      by_panels(a);
    } else if constexpr (PreparesOnce<Product>) {
      by_prepared_panels(a);
    } else {
      by_rows(a, rows_of_block(a, block_bytes(a)));
    }
  }

 private:
  using Element = typename Product::Element;
  using Row = typename Product::Row;
  static constexpr int kMaxRows = Product::kMaxRows;
  static constexpr int kFew = Product::panels_at_once(kMaxRows);
  static constexpr int kLeastRows = TakesAnyHeight<Product> ? 16 : 1;

  static int64_t num_panels(const LinearArgs& a) { return (a.columns + kPanel - 1) / kPanel; }

  static int64_t block_bytes(const LinearArgs& a) {
    if constexpr (HasLargeCache<Product>) {
      const int64_t bytes = kBlockRows * Product::packed_row(a) * static_cast<int64_t>(sizeof(Element));
      if (bytes > kBlockBytes) return least(bytes, Product::kBlockBytes);
    }
    return kBlockBytes;
  }

  static constexpr int64_t streamed_bytes() {
    if constexpr (HasLargeCache<Product>) return Product::kStreamedBytes;
    return kStreamedBytes;
  }

  // Whose packed rows take up to `bytes`, or of one tile.
  static int64_t rows_of_block(const LinearArgs& a, int64_t bytes) {
    const int64_t most = bytes / (Product::packed_row(a) * static_cast<int64_t>(sizeof(Element)));
    return most / kMaxRows > 1 ? most / kMaxRows * kMaxRows : kMaxRows;
  }

  // Where part `part` of `parts` of all rows begins: matrix tiles take as long for a few rows as for 16.
  static int64_t first_row(const LinearArgs& a, int64_t part, int64_t parts) {
    const int64_t row = a.rows * part / parts;
    return TakesAnyHeight<Product> ? least((row + kLeastRows - 1) / kLeastRows * kLeastRows, a.rows) : row;
  }

  // `rows`: of the highest tile.
  static int64_t panels_at_a_time(const LinearArgs& a, int rows = kMaxRows) {
    if constexpr (PreparesOnce<Product>) {
      return Product::panels_at_a_time(a);
    } else if constexpr (HasLargeCache<Product>) {
      const int64_t together = Product::panels_at_once(rows), fitting = Product::kPanelBytes / Product::panel_size(a);
      return fitting > together ? fitting / together * together : together;
    } else {
      return Product::kPanelsAtATime;
    }
  }

  // How rows [first, last) fall into tiles: of about equal height or, where any height will do, into whole ones and what is
  // left, in up to two of two thirds.
  struct Tiles {
    static constexpr int kLowRows = TakesAnyHeight<Product> ? 32 : kMaxRows;
    int64_t first, last, whole, count;
    Tiles(int64_t first, int64_t last) : first(first), last(last) {
      const int64_t rows = last - first;
      whole = rows / kMaxRows;
      if (whole > 0 && rows % kMaxRows > 0 && rows % kMaxRows <= kMaxRows - kLowRows) --whole;
      count = whole + (rows - whole * kMaxRows + kLowRows - 1) / kLowRows;
    }
    int64_t start(int64_t tile) const {
      if constexpr (!TakesAnyHeight<Product>) return first + (last - first) * tile / count;
      return least(first + (tile <= whole ? tile * kMaxRows : whole * kMaxRows + (tile - whole) * kLowRows), last);
    }
    int64_t height(int64_t tile) const { return start(tile + 1) - start(tile); }
    int highest() const { return static_cast<int>(height(TakesAnyHeight<Product> ? 0 : count - 1)); }
    int64_t tile_of(int64_t row) const {
      const int64_t at = row - first;
      if constexpr (!TakesAnyHeight<Product>) return ((at + 1) * count - 1) / (last - first);
      return at < whole * kMaxRows ? at / kMaxRows : whole + (at - whole * kMaxRows) / kLowRows;
    }
  };

  // A tile of R rows times panels [begin, end).
  template <int R>
  static void multiply_tile(int rows, const LinearArgs& a, const Element* x, int64_t row, int64_t begin, int64_t end,
                            Ahead ahead) {
    if constexpr (R > 0) {
      if (rows != R) return multiply_tile<R - 1>(rows, a, x, row, begin, end, ahead);
      constexpr int P = Product::panels_at_once(R);
      const int64_t step = num_runs(a) * ahead.lines * 64;
      int64_t panel = begin;
      for (; panel + P <= end; panel += P, ahead.at += step) Product::template multiply<R, P>(a, x, row, panel, ahead);
      for (; panel < end; ++panel, ahead.at += step) Product::template multiply<R, 1>(a, x, row, panel, ahead);
    }
  }

  // The same of a product that takes any height.
  static void multiply_any(int rows, const LinearArgs& a, const Element* x, int64_t row, int64_t begin, int64_t end,
                           AheadOfTiles& ahead) {
    const int64_t runs = num_runs(a);
    int64_t panel = begin;
    if (Product::panels_at_once(rows) == 2) {
      for (; panel + 2 <= end; panel += 2, ahead.skip(2 * runs)) Product::template multiply_rows<2>(a, x, rows, row, panel, ahead);
    }
    for (; panel < end; ++panel, ahead.skip(runs)) Product::template multiply_rows<1>(a, x, rows, row, panel, ahead);
  }

  // Packs rows, which may have to be normalised before.
  class Packer {
   public:
    explicit Packer(const LinearArgs& a)
        : args_(a),
          slots_(a.adapted.order == nullptr ? 1 : kAdaptedRows),
          normed_(a.residual == nullptr ? 0 : max_threads() * slots_ * a.inner) {}

    // A row into its place in the packed tiles. Returns its values, which stay, if they are normalised, until the thread has
    // others in `slot`, one of kAdaptedRows where there are adapters.
    const Row* pack(int64_t place, const Tiles& tiles, Element* packed, int64_t slot = 0) const {
      const int64_t row = row_in_place(args_, place);
      const Row* x = static_cast<const Row*>(args_.x) + row_of_x(args_, row) * args_.x_stride;
      if (args_.residual != nullptr) {
        Row* normed = normed_.get() + (this_thread() * slots_ + slot) * args_.inner;
        Row* residual = static_cast<Row*>(args_.residual) + row * args_.residual_stride;
        norm_row(x, residual, args_.norm_weight, args_.wide_norm_weight, normed, args_.inner, args_.eps);
        x = normed;
      }
      if constexpr (LeavesRows<Product>) Product::leave_row(args_, x, row);
      const int64_t tile = tiles.tile_of(place), start = tiles.start(tile);
      Element* to = packed + (start - tiles.first) * Product::packed_row(args_);
      Product::pack_row(args_, x, place - start, tiles.height(tile), to);
      return x;
    }

    // Rows that have one adapter, and their products with its A.
    void pack(const AdaptedTile& rows, const Tiles& tiles, Element* packed) const {
      const Row* x[kAdaptedRows];
      for (int64_t i = 0; i < rows.count; ++i) x[i] = pack(rows.first + i, tiles, packed, i);
      shrink(args_, rows, x);
    }

    // All rows of the tiles, by the calling thread.
    void pack_all(const Tiles& tiles, Element* packed) const {
      if (args_.adapted.order == nullptr) {
        for (int64_t row = tiles.first; row < tiles.last; ++row) pack(row, tiles, packed);
        return;
      }
      const AdaptedTiles adapted(args_.adapted, tiles.first, tiles.last);
      for (int64_t i = 0; i < adapted.count(); ++i) pack(adapted[i], tiles, packed);
    }

    // The same by all threads of a parallel region.
    void pack_together(const Tiles& tiles, Element* packed) const {
      if (args_.adapted.order == nullptr) {
#pragma omp for schedule(static)
        for (int64_t row = tiles.first; row < tiles.last; ++row) pack(row, tiles, packed);
        return;
      }
      const AdaptedTiles adapted(args_.adapted, tiles.first, tiles.last);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < adapted.count(); ++i) pack(adapted[i], tiles, packed);
    }

   private:
    const LinearArgs& args_;
    const int64_t slots_;
    Scratch<Row> normed_;
  };

  // The packed tiles times panels [begin, end). `next`: the first of as many panels that this thread is likely to take
  // after the last of them.
  [[gnu::noinline]] static void multiply_block(const LinearArgs& a, const Tiles& tiles, int64_t begin, int64_t end, int64_t next,
                             const Element* packed) {
    const int64_t together = panels_at_a_time(a, tiles.highest());
    for (int64_t panel = begin; panel < end; panel += together) {
      const int64_t stop = least(panel + together, end);
      const int64_t then = stop < end ? stop : next;
      if constexpr (PreparesPanels<Product>) Product::prepare(a, panel, stop);
      if (a.adapted.b != nullptr) fetch_blocks<Row>(a, panel, stop);
      const char* at = static_cast<const char*>(a.weight) + then * Product::panel_size(a);
      const int64_t bytes = least(stop - panel, num_panels(a) - then) * Product::panel_size(a), runs = num_runs(a);
      const auto multiply = [&](const auto& tile_times) {
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          const int64_t start = tiles.start(tile);
          tile_times(static_cast<int>(tiles.height(tile)), packed + (start - tiles.first) * Product::packed_row(a), start);
        }
      };
      if constexpr (TakesAnyHeight<Product>) {
        const int64_t all = tiles.count * (stop - panel) * runs * 64;
        AheadOfTiles ahead{at, bytes > 0 ? (bytes * AheadOfTiles::kParts + all - 1) / all : 0};
        multiply([&](int height, const Element* x, int64_t start) { multiply_any(height, a, x, start, panel, stop, ahead); });
      } else {
        // While the first tile passes, the panels themselves come from memory.
        const int64_t calls = (stop - panel + kFew - 1) / kFew, share = (tiles.count - 1) * calls * runs * 64;
        const int lines = bytes > 0 && share > 0 ? static_cast<int>((bytes + share - 1) / share) : 0;
        Ahead ahead{at, 0};
        multiply([&](int height, const Element* x, int64_t start) {
          multiply_tile<kMaxRows>(height, a, x, start, panel, stop, ahead);
          ahead.at += ahead.lines * calls * runs * 64;
          ahead.lines = lines;
        });
      }
    }
  }

  // Many rows: each thread takes blocks of them, and all panels.
  static void by_rows(const LinearArgs& a, int64_t block) {
    const int64_t threads = max_threads();
    // A whole number of rounds, so that no thread waits for a last block.
    const int64_t blocks = (a.rows + block * threads - 1) / (block * threads) * threads;
    Shares shares(blocks);
    const Packer packer(a);
#pragma omp parallel
    {
      Scratch<Element> packed((a.rows / blocks + kLeastRows) * Product::packed_row(a));
      const ThreadArgs<Product> own(a);
      int64_t turn = 0;
      for (int64_t part = shares.claim(&turn); part < blocks; part = shares.claim(&turn)) {
        multiply_rows(own.args, first_row(a, part, blocks), first_row(a, part + 1, blocks), packer, packed.get());
      }
    }
  }

  // The same where panels are prepared: each thread takes some of them, and all rows.
  static void by_prepared_panels(const LinearArgs& a) {
    const int64_t panels = num_panels(a), threads = max_threads(), together = panels_at_a_time(a);
    // A whole number of rounds of them, too.
    const int64_t groups = (panels + together * threads - 1) / (together * threads) * threads;
    const int64_t block = rows_of_block(a, kPreparedForBytes), blocks = (a.rows + block - 1) / block;
    const Packer packer(a);
    const Scratch<Element> packed((a.rows / blocks + 1) * Product::packed_row(a));
#pragma omp parallel
    {
      const ThreadArgs<Product> own(a);
      for (int64_t part = 0; part < blocks; ++part) {
        const Tiles tiles(a.rows * part / blocks, a.rows * (part + 1) / blocks);
        packer.pack_together(tiles, packed.get());
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < groups; ++group) {
          multiply_block(own.args, tiles, panels * group / groups, panels * (group + 1) / groups, panels, packed.get());
        }
      }
    }
  }

  // The calling thread takes all blocks of rows, and all panels.
  static void by_this_thread(const LinearArgs& a) {
    const int64_t block = rows_of_block(a, block_bytes(a)), blocks = (a.rows + block - 1) / block;
    const Packer packer(a);
    const Scratch<Element> packed((a.rows / blocks + 1) * Product::packed_row(a));
    const ThreadArgs<Product> own(a);
    for (int64_t part = 0; part < blocks; ++part) {
      multiply_rows(own.args, a.rows * part / blocks, a.rows * (part + 1) / blocks, packer, packed.get());
    }
  }

  static void multiply_rows(const LinearArgs& a, int64_t begin, int64_t end, const Packer& packer, Element* packed) {
    const Tiles tiles(begin, end);
    packer.pack_all(tiles, packed);
    multiply_block(a, tiles, 0, num_panels(a), 0, packed);
  }

  // Few rows: all are packed once, by all threads, and the panels are shared out: in runs for the tiles that take many
  // at once, else a few at a time to whoever is free, since another process may have taken a core from this one.
  static void by_panels(const LinearArgs& a) {
    const int64_t panels = num_panels(a), threads = max_threads();
    const Tiles tiles(0, a.rows);
    const Packer packer(a);
    Scratch<Element> packed(a.rows * Product::packed_row(a));
    const bool in_runs = Product::panels_at_once(tiles.highest()) > kFew;
    // Single ones at the end, so that all finish together.
    const int64_t groups = in_runs ? 0 : panels > threads ? (panels - threads) / kFew : 0;
    const int64_t parts = in_runs ? least(threads, panels) : groups + panels - groups * kFew;
#pragma omp parallel if (a.rows * a.columns * a.inner > 65536)
    {
      packer.pack_together(tiles, packed.get());
      const ThreadArgs<Product> own(a);
#pragma omp for schedule(dynamic) nowait
      for (int64_t part = 0; part < parts; ++part) {
        int64_t begin = panels * part / parts, end = panels * (part + 1) / parts;
        if (!in_runs) {
          begin = part < groups ? part * kFew : part + groups * (kFew - 1);
          end = begin + (part < groups ? kFew : 1);
        }
        multiply_block(own.args, tiles, begin, end, begin + (end - begin) * threads, packed.get());
      }
    }
  }
};

template <typename T>
inline Vec load_bias(const LinearArgs& a, int64_t column) {
  const int64_t left = a.columns - column;
  if (a.bias == nullptr || left <= 0) return zero();
  return load_n(static_cast<const T*>(a.bias) + column, static_cast<int>(least(left, kLanes)));
}

// Rounds kLanes values to the result's dtype and writes those that the result has.
template <typename T>
inline void write_values(const LinearArgs& a, Vec values, int64_t place, int64_t column) {
  const int64_t left = a.out_columns - column, at = row_in_place(a, place) * a.out_stride + column;
  float* floats = static_cast<float*>(a.out) + at;
  T* rounded = static_cast<T*>(a.out) + at;
  if (a.streams) {
    if (left > 0) stream(floats, values);
  } else if (left >= kLanes) {
    a.float_out ? store(floats, values) : store(rounded, values);
  } else if (left > 0) {
    a.float_out ? store_n(floats, values, static_cast<int>(left)) : store_n(rounded, values, static_cast<int>(left));
  }
}

// Finish a row's sums in kLanes columns of a panel's first half and of its second, from lane `lane` of each.
template <typename T>
inline void write_sums(const LinearArgs& a, Vec low, Vec high, int64_t row, int64_t panel, int64_t lane) {
  const int64_t column = panel * kPanel + lane;
  low = low + load_bias<T>(a, column);
  high = high + load_bias<T>(a, column + 16);
  if (a.gated) {
    write_values<T>(a, silu(low) * high, row, panel * 16 + lane);
  } else {
    write_values<T>(a, low, row, column);
    write_values<T>(a, high, row, column + 16);
  }
}

// The same of a tile's sums [rows][panels][2], where all of it is within the result. Rows are a loop: unrolled for the tiles
// of all heights they would be most of what there is to compile.
template <typename T, bool kGated, bool kFloats, int P>
[[gnu::always_inline]] inline void write_within(const LinearArgs& a, const Vec* sums, int rows, int64_t row,
                                                int64_t panel, int64_t lane) {
  Vec bias[P][2];
  unroll<P>([&](int p) VLLM_INLINE {
    const int64_t column = (panel + p) * kPanel + lane;
    bias[p][0] = load_bias<T>(a, column);
    bias[p][1] = load_bias<T>(a, column + 16);
  });
  for (int r = 0; r < rows; ++r, sums += 2 * P) {
    const int64_t at = row_in_place(a, row + r) * a.out_stride + panel * (kGated ? 16 : kPanel) + lane;
    T* rounded = static_cast<T*>(a.out) + at;
    float* floats = static_cast<float*>(a.out) + at;
    unroll<P>([&](int p) VLLM_INLINE {
      const Vec low = sums[2 * p] + bias[p][0], high = sums[2 * p + 1] + bias[p][1];
      if constexpr (kGated) {
        store(rounded + p * 16, silu(low) * high);
      } else if (kFloats && a.streams) {
        stream(floats + p * kPanel, low);
        stream(floats + p * kPanel + 16, high);
      } else if constexpr (kFloats) {
        store(floats + p * kPanel, low);
        store(floats + p * kPanel + 16, high);
      } else {
        store(rounded + p * kPanel, low);
        store(rounded + p * kPanel + 16, high);
      }
    });
  }
}

// The same, wherever the tile is.
template <typename T, int P>
[[gnu::noinline]] void write_rows(const LinearArgs& a, Vec* sums, int rows, int64_t row, int64_t panel, int64_t lane) {
  if (a.adapted.b != nullptr) adapt_sums<T>(a, sums, rows, P, row, panel, lane);
  const bool within = (panel + P) * (a.gated ? kPanel / 2 : kPanel) <= a.out_columns;
  if (within && a.gated && !a.float_out) {
    write_within<T, true, false, P>(a, sums, rows, row, panel, lane);
  } else if (within && !a.gated && a.float_out) {
    write_within<T, false, true, P>(a, sums, rows, row, panel, lane);
  } else if (within && !a.gated && !a.float_out) {
    write_within<T, false, false, P>(a, sums, rows, row, panel, lane);
  } else {
    for (int r = 0; r < rows; ++r) {
      for (int p = 0; p < P; ++p, sums += 2) write_sums<T>(a, sums[0], sums[1], row + r, panel + p, lane);
    }
  }
}

template <typename T, int R, int P>
inline void write_tile(const LinearArgs& a, Vec (&sums)[R][P][2], int64_t row, int64_t panel, int64_t lane) {
  write_rows<T, P>(a, sums[0][0], R, row, panel, lane);
}

// A tile's sums of float32 chains over k, kLanes columns of each half of P panels. A Chain has:
//
//   Element, Weight, kValues   what packed rows and panels consist of, and how many neighbours of a row an Element is
//   multiply<R, P>(x, panel, panel_size, inner, group, ahead, sums)   sums[R][P][2] += R rows of packed x times P
//                                                                     panels over `inner` values of k
//
// It does not depend on the dtype of x, which is packed, nor on that of the result.
template <typename Chain, int R, int P>
[[gnu::noinline]] void sum_chains(const LinearArgs& a, const typename Chain::Element* x, int64_t panel, int group,
                                  Ahead ahead, Vec (&totals)[R][P][2]) {
  // Short chains keep the rounding error small: of 256 additions, or of a quarter more rather than leaving so few over.
  constexpr int64_t kChain = 256 * Chain::kValues;
  const int64_t panel_size = a.inner * kPanel;
  const auto* weight = static_cast<const typename Chain::Weight*>(a.weight) + panel * panel_size;
  int64_t k = 0;
  do {
    const int64_t left = a.inner - k, chain = left <= kChain + kChain / 4 ? left : kChain;
    Vec sums[R][P][2];
    unroll<R>([&](int r) VLLM_INLINE {
      unroll<P>([&](int p) VLLM_INLINE { sums[r][p][0] = sums[r][p][1] = zero(); });
    });
    Chain::template multiply<R, P>(x + k / Chain::kValues * R, weight + k * kPanel, panel_size, chain, group, ahead, sums);
    if (k > 0) {
      unroll<R>([&](int r) VLLM_INLINE {
        unroll<P>([&](int p) VLLM_INLINE {
          sums[r][p][0] = totals[r][p][0] + sums[r][p][0];
          sums[r][p][1] = totals[r][p][1] + sums[r][p][1];
        });
      });
    }
    unroll<R>([&](int r) VLLM_INLINE {
      unroll<P>([&](int p) VLLM_INLINE {
        totals[r][p][0] = sums[r][p][0];
        totals[r][p][1] = sums[r][p][1];
      });
    });
    k += chain;
  } while (k < a.inner);
}

// sums [rows][panels][2] *= the columns' scales.
[[gnu::noinline]] inline void scale_sums(const LinearArgs& a, Vec* sums, int rows, int panels, int64_t panel, int64_t lane) {
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < panels; ++p, sums += 2) {
      const float* scales = a.scales + (panel + p) * kPanel + lane;
      sums[0] = sums[0] * load(scales);
      sums[1] = sums[1] * load(scales + 16);
    }
  }
}

// Products whose tiles are sums of a Chain share this; T: x's dtype, and the result's.
template <typename Chain, typename T>
struct ChainedProduct {
  using Row = T;
  using Element = typename Chain::Element;
  static constexpr int kMaxRows = Chain::kMaxRows;
  static constexpr int64_t kPanelsAtATime = 4;

  // Few rows leave registers free: several panels at once keep enough chains in flight to hide latency.
  static constexpr int panels_at_once(int rows) { return 8 * rows <= 2 * kMaxRows ? 4 : 4 * rows <= 2 * kMaxRows ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) {
    return a.inner * kPanel * static_cast<int64_t>(sizeof(typename Chain::Weight));
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const Element* x, int64_t row, int64_t panel, Ahead ahead) {
    for (int group = 0; group < kGroups; ++group) {
      const int64_t lane = group * kLanes;
      Vec totals[R][P][2];
      sum_chains<Chain>(a, x, panel, group, ahead, totals);
      if (a.scales != nullptr) scale_sums(a, totals[0][0], R, P, panel, lane);
      write_tile<T>(a, totals, row, panel, lane);
    }
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
