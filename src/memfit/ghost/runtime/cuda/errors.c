/* This thread's last error, and the names and texts of the statuses. */
#include "core/ghost.h"

static _Thread_local status last_error;

status ghost_fail(status error)
{
    if (error != SUCCESS)
        last_error = error;
    return error;
}

API status cudaGetLastError(void)
{
    status error = last_error;
    last_error = SUCCESS;
    return error;
}

API status cudaPeekAtLastError(void) { return last_error; }

struct error_text {
    status error;
    const char *name, *text;
};

static const struct error_text ERRORS[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {HOST_MEMORY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "not supported by memfit's ghost"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched",
     "the stream's capture was not begun by this call's counterpart"},
};

static const struct error_text *error_text(status error)
{
    static const struct error_text unknown = {-1, "cudaErrorUnknown", "unknown error"};
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error)
            return &ERRORS[i];
    return &unknown;
}

API const char *cudaGetErrorName(status error) { return error_text(error)->name; }
API const char *cudaGetErrorString(status error) { return error_text(error)->text; }

ENTRY(cuGetErrorName(status error, const char **name), *name = error_text(error)->name)
ENTRY(cuGetErrorString(status error, const char **text), *text = error_text(error)->text)
