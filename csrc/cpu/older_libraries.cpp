// Definitions for this library alone, of what the compiler's headers ask of newer libraries; see older_libraries.h.
#include <new>
#include <sstream>

#if defined(__GLIBCXX__)
// Whether no thread was ever started, so that counters of shared pointers need not be atomic: they always are here.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

template class basic_stringbuf<char>;
template class basic_ostringstream<char>;
template class basic_stringstream<char>;
}  // namespace std
#endif
