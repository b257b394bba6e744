/* NVIDIA's functions: the runtime's from the library that PyTorch uses, the driver's from the runtime. */

#include <dlfcn.h>
#include <string.h>

#include "cuda_heaps.h"

enum { CUDA_12 = 12000 }; /* the version of the driver's functions that is requested */

static cuda_functions functions;

/* Find a function where PyTorch finds it: among the libraries that libc10_cuda.so was linked with. */
static void *runtime_function(const char *name)
{
    void *torch = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void *found = torch ? dlsym(torch, name) : NULL;
    if (torch)
        dlclose(torch); /* PyTorch itself keeps it loaded */
    return found ? found : dlsym(RTLD_DEFAULT, name);
}

static void *driver_function(const char *name)
{
    status (*by_version)(const char *, void **, unsigned, unsigned long long, int *);
    status (*by_name)(const char *, void **, unsigned long long, int *); /* until CUDA 12 */
    void *found = NULL;
    int how;
    *(void **)&by_version = runtime_function("cudaGetDriverEntryPointByVersion");
    if (by_version)
        return by_version(name, &found, CUDA_12, 0, &how) ? NULL : found;
    *(void **)&by_name = runtime_function("cudaGetDriverEntryPoint");
    return !by_name || by_name(name, &found, 0, &how) ? NULL : found;
}

#define RUNTIME(name) {"cuda" #name, runtime_function, (void **)&functions.name}
#define DRIVER(name) {"cu" #name, driver_function, (void **)&functions.name}
#define WANTED(library, name, arguments) library(name),

const cuda_functions *cuda_driver(void)
{
    static const struct {
        const char *name;
        void *(*find)(const char *);
        void **to;
    } wanted[] = {CUDA_FUNCTIONS(WANTED)};
    static int found;
    for (size_t i = 0; !found && i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].to = wanted[i].find(wanted[i].name);
        if (!*wanted[i].to)
            return NULL;
    }
    found = 1;
    return &functions;
}
