// Instruction-set levels. Every kernel is compiled once for each level, in the namespace vllm_cpu::<level>; the level
// that runs is chosen when the library is first used.
#pragma once

// A level that was not compiled stands for the next narrower one; those below the narrowest, for that one.
namespace vllm_cpu {
#if defined(VLLM_HAVE_PORTABLE)
namespace portable {}
#elif defined(VLLM_HAVE_AVX2)
namespace avx2 {}
namespace portable = avx2;
#elif defined(VLLM_HAVE_AVX512)
namespace avx512 {}
namespace portable = avx512;
#elif defined(VLLM_HAVE_AVX512_VNNI)
namespace avx512_vnni {}
namespace portable = avx512_vnni;
#else
namespace avx512_bf16 {}
namespace portable = avx512_bf16;
#endif
#ifdef VLLM_HAVE_AVX2
namespace avx2 {}
#else
namespace avx2 = portable;
#endif
#ifdef VLLM_HAVE_AVX512
namespace avx512 {}
#else
namespace avx512 = avx2;
#endif
// This level has kernels of its own only where products of bytes pay, unless the level below it was not compiled.
#ifdef VLLM_HAVE_AVX512_VNNI
namespace avx512_vnni {
using namespace avx512;
}
#else
namespace avx512_vnni = avx512;
#endif
#ifdef VLLM_HAVE_AVX512_BF16
namespace avx512_bf16 {}
#else
namespace avx512_bf16 = avx512_vnni;
#endif
// This level has kernels of its own only where float16 arithmetic pays: kernels.h declares them.
#ifdef VLLM_HAVE_AVX512_FP16
namespace avx512_fp16 {
using namespace avx512_bf16;
}
#else
namespace avx512_fp16 = avx512_bf16;
#endif
// And this one only where matrix tiles multiply.
#ifdef VLLM_HAVE_AMX
namespace amx {
using namespace avx512_fp16;
}
#else
namespace amx = avx512_fp16;
#endif

enum class Isa : int { none = -1, portable = 0, avx2 = 1, avx512 = 2, avx512_vnni = 3, avx512_bf16 = 4, avx512_fp16 = 5, amx = 6 };
constexpr Isa kWidest = Isa::amx;

// The level in use: the widest that was compiled, that this machine runs and that VLLM_CPU_ISA allows, or else the
// narrowest that was compiled and runs. None: this machine runs none of them, and no kernel may be called.
Isa current_isa();

// Uses `level`, or the widest possible one below it, or else the narrowest; returns what is in use then.
Isa set_isa(Isa level);

// Whether the level in use has bfloat16 dot products that outrun float32 multiply-adds: on AMD they run at twice their
// rate, on Intel at half of it.
bool has_fast_bf16_dot();

template <typename F>
F* pick(F* portable, F* avx2, F* avx512, F* avx512_vnni, F* avx512_bf16, F* avx512_fp16, F* amx) {
  switch (current_isa()) {
    case Isa::amx:
      return amx;
    case Isa::avx512_fp16:
      return avx512_fp16;
    case Isa::avx512_bf16:
      return avx512_bf16;
    case Isa::avx512_vnni:
      return avx512_vnni;
    case Isa::avx512:
      return avx512;
    case Isa::avx2:
      return avx2;
    default:
      return portable;
  }
}
}  // namespace vllm_cpu

// Runs DECLARE(level) for each compiled level: how a header declares its kernels in every namespace.
#ifdef VLLM_HAVE_PORTABLE
#define VLLM_FOR_PORTABLE(DECLARE) DECLARE(portable)
#else
#define VLLM_FOR_PORTABLE(DECLARE)
#endif
#ifdef VLLM_HAVE_AVX2
#define VLLM_FOR_AVX2(DECLARE) DECLARE(avx2)
#else
#define VLLM_FOR_AVX2(DECLARE)
#endif
#ifdef VLLM_HAVE_AVX512
#define VLLM_FOR_AVX512(DECLARE) DECLARE(avx512)
#else
#define VLLM_FOR_AVX512(DECLARE)
#endif
// The kernels of a level call those of their own.
#if defined(VLLM_HAVE_AVX512_VNNI) && (!defined(VLLM_HAVE_AVX512) || defined(VLLM_ISA))
#define VLLM_FOR_AVX512_VNNI(DECLARE) DECLARE(avx512_vnni)
#else
#define VLLM_FOR_AVX512_VNNI(DECLARE)
#endif
#ifdef VLLM_HAVE_AVX512_BF16
#define VLLM_FOR_AVX512_BF16(DECLARE) DECLARE(avx512_bf16)
#else
#define VLLM_FOR_AVX512_BF16(DECLARE)
#endif
#define VLLM_FOR_EACH_ISA(DECLARE) \
  VLLM_FOR_PORTABLE(DECLARE) VLLM_FOR_AVX2(DECLARE) VLLM_FOR_AVX512(DECLARE) VLLM_FOR_AVX512_VNNI(DECLARE) \
  VLLM_FOR_AVX512_BF16(DECLARE)

// The kernel `name` of the level in use.
#define VLLM_KERNEL(name)                                                                          \
  (::vllm_cpu::pick(&::vllm_cpu::portable::name, &::vllm_cpu::avx2::name, &::vllm_cpu::avx512::name, \
                    &::vllm_cpu::avx512_vnni::name, &::vllm_cpu::avx512_bf16::name, &::vllm_cpu::avx512_fp16::name, \
                    &::vllm_cpu::amx::name))
