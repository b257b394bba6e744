/* CUPTI, for torch.profiler: it can subscribe, and receives no device activity. */
#include "core/ghost.h"

enum { CUPTI_MAX_LIMIT_REACHED = 12 }; /* cupti_result.h: no further record in the buffer */

/* CUPTI_API_VERSION of CUDA 13.0 and 12.8 */
ENTRY(cuptiGetVersion(uint32_t *version), *version = CUDA_VERSION >= 13000 ? 130000 : 26)
ENTRY(cuptiGetResultString(int result, const char **text),
      *text = result == SUCCESS ? "CUPTI_SUCCESS" : "not supported by memfit's ghost")
ENTRY(cuptiGetCallbackName(int domain, uint32_t id, const char **name), *name = "")

API status cuptiSubscribe(void **subscriber, void *callback, void *data)
{
    static char only;
    *subscriber = &only;
    return SUCCESS;
}

API status cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, void **record)
{
    *record = NULL;
    return CUPTI_MAX_LIMIT_REACHED;
}

ENTRY(cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped), *dropped = 0)

API status cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last)
{
    if (last)
        *last = 0;
    return SUCCESS;
}
