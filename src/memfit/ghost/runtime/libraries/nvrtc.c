/* NVRTC: programs compile to an empty image, which cuModuleLoadData accepts (cuda/driver.c). PyTorch
 * compiles some elementwise kernels this way on first use. */
#include "core/ghost.h"

#define EMPTY 1 /* bytes of an image or log that holds only its final 0 */

ENTRY(nvrtcVersion(int *major, int *minor), *major = CUDA_VERSION / 1000; *minor = CUDA_VERSION / 10 % 100)

API const char *nvrtcGetErrorString(int error)
{
    return error == SUCCESS ? "NVRTC_SUCCESS" : "not supported by memfit's ghost";
}

CALL(nvrtcCreateProgram(void **program, const char *source, const char *name, int header_count,
                        const char *const *headers, const char *const *include_names),
     ghost_new_handle(program, 64))
ENTRY(nvrtcDestroyProgram(void **program), free(*program); *program = NULL)

API status nvrtcAddNameExpression(void *program, const char *expression) { return SUCCESS; }
API status nvrtcCompileProgram(void *program, int count, const char *const *options) { return SUCCESS; }

ENTRY(nvrtcGetLoweredName(void *program, const char *expression, const char **lowered), *lowered = expression)

#define ARTIFACT(get, get_size)                                                                              \
    ENTRY(get_size(void *program, size_t *size), *size = EMPTY)                                              \
    ENTRY(get(void *program, char *out), *out = '\0')

ARTIFACT(nvrtcGetPTX, nvrtcGetPTXSize)
ARTIFACT(nvrtcGetCUBIN, nvrtcGetCUBINSize)
ARTIFACT(nvrtcGetProgramLog, nvrtcGetProgramLogSize)
