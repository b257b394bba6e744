/* PyTorch's exceptions, thrown from C: CUDAPluggableAllocator takes NULL for an address and continues with
 * it.
 *
 * The exception is a c10::OutOfMemoryError, torch.OutOfMemoryError in Python. C creates it with the
 * functions that libc10.so and libstdc++.so export. Source: CUDAPluggableAllocator::malloc and
 * c10/util/Exception.h, PyTorch 2.14.1; Itanium C++ ABI, 2.9.2 (virtual tables) and 3.1 (arguments and
 * exceptions). */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_heaps.h"

enum { EXCEPTION_ROOM = 1024 }; /* bytes; an Error is smaller than 200 */

typedef struct {
    const char *function, *file;
    uint32_t line;
} source_location; /* c10::SourceLocation */

typedef struct {
    _Alignas(8) char content[32];
} string; /* std::string */

static void *torch_function(const char *name)
{
    /* Up to PyTorch 2.11, the exception's tables are in libc10_cuda.so alone. */
    static const char *const names[] = {"libc10.so", "libc10_cuda.so"};
    void *found = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !found; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
        found = library ? dlsym(library, name) : NULL; /* in it, or in a library that it was linked with */
        if (library)
            dlclose(library);
    }
    return found;
}

_Noreturn void throw_error(const char *message)
{
    void (*fail)(const char *, const char *, uint32_t, const char *);
    *(void **)&fail = torch_function("_ZN3c106detail14torchCheckFailEPKcS2_jS2_");
    if (fail)
        fail("placing", "memfit", 0, message);
    fprintf(stderr, "%s\n", message); /* NULL must not reach PyTorch */
    abort();
}

_Noreturn void throw_out_of_memory(const char *message)
{
    void *(*allocate)(size_t);
    void (*make_string)(string *, const char *, const char *); /* the last argument: an empty allocator */
    void (*end_string)(string *);
    void (*make)(void *, source_location, string *);
    void (*throw)(void *, void *, void (*)(void *));
    *(void **)&allocate = torch_function("__cxa_allocate_exception");
    *(void **)&throw = torch_function("__cxa_throw");
    *(void **)&make_string =
        torch_function("_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_");
    *(void **)&end_string = torch_function("_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev");
    *(void **)&make = torch_function(
        "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
    void *type = torch_function("_ZTIN3c1016OutOfMemoryErrorE");
    void **table = torch_function("_ZTVN3c1016OutOfMemoryErrorE");
    if (!allocate || !throw || !make_string || !end_string || !make || !type || !table)
        throw_error(message);

    string text;
    void *error = allocate(EXCEPTION_ROOM);
    make_string(&text, message, "");
    make(error, (source_location){"placing", "memfit", 0}, &text);
    end_string(&text);
    void **methods = table + 2; /* an OutOfMemoryError is an Error of another type */
    *(void ***)error = methods;
    void (*destroy)(void *);
    *(void **)&destroy = methods[0];
    throw(error, type, destroy);
    abort(); /* not reached */
}
