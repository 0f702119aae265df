// The versions of library functions that glibc 2.28 and libstdc++ 8 have, which torch's own wheels run on: a linker takes the
// newest that it finds. They differ in how errors are told (exp, log) or in their version alone (wait). Included first.
#pragma once

#include <cstdint>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
#if defined(__GLIBCXX__)
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
#endif
