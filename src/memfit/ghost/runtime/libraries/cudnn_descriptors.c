/* cuDNN: handles, descriptors, and how a question about a size is written. cudnn.h lists the other files. */
#include "libraries/cudnn.h"
#include "cuda/stream_marks.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

API size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }

/* Source: library_types.h, libraryPropertyType: 0 major, 1 minor, 2 patch level. */
API status cudnnGetProperty(int type, int *value)
{
    const int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
    if (type < 0 || type > 2)
        return DNN_BAD_PARAM;
    *value = parts[type];
    return SUCCESS;
}

API const char *cudnnGetErrorString(int error)
{
    return error == SUCCESS ? "CUDNN_STATUS_SUCCESS" : "not supported by memfit's ghost";
}

API void cudnnGetLastErrorString(char *message, size_t capacity)
{
    if (capacity)
        message[0] = '\0';
}

/* ---- Handles --------------------------------------------------------------------------------- */

struct dnn_handle {
    void *stream;
};

HANDLE(cudnnCreate, cudnnDestroy, struct dnn_handle)
ENTRY(cudnnSetStream(struct dnn_handle *handle, void *stream), mark_stream(handle->stream = stream))
ENTRY(cudnnGetStream(struct dnn_handle *handle, void **stream), *stream = handle->stream)

/* ---- Descriptors that are never read --------------------------------------------------------- */

DESCRIPTOR(Activation, char)
DESCRIPTOR(Pooling, char)
DESCRIPTOR(SpatialTransformer, char)

/* ---- Tensors and filters --------------------------------------------------------------------- */

DESCRIPTOR(Tensor, struct tensor)
DESCRIPTOR(Filter, struct tensor)

API status cudnnSetTensorNdDescriptor(struct tensor *tensor, int data_type, int dimensions, const int *sizes,
                                      const int *strides)
{
    *tensor = (struct tensor){.data_type = data_type, .dimensions = capped_dimensions(dimensions)};
    for (int i = 0; i < tensor->dimensions; i++) {
        tensor->sizes[i] = sizes[i];
        tensor->strides[i] = strides[i];
    }
    return SUCCESS;
}

API status cudnnGetTensorNdDescriptor(const struct tensor *tensor, int wanted, int *data_type,
                                      int *dimensions, int *sizes, int *strides)
{
    *data_type = tensor->data_type;
    *dimensions = tensor->dimensions;
    for (int i = 0; i < tensor->dimensions && i < wanted; i++) {
        sizes[i] = (int)tensor->sizes[i];
        strides[i] = (int)tensor->strides[i];
    }
    return SUCCESS;
}

/* Source: cudnn_graph.h, cudnnTensorFormat_t. */
enum { FORMAT_NCHW = 0, FORMAT_NHWC = 1 };

API status cudnnSetFilterNdDescriptor(struct tensor *filter, int data_type, int format, int dimensions,
                                      const int *sizes)
{
    *filter = (struct tensor){.data_type = data_type, .dimensions = capped_dimensions(dimensions)};
    int64_t stride = 1;
    bool channels_last = format == FORMAT_NHWC && filter->dimensions > 1;
    if (channels_last) {
        filter->strides[1] = 1;
        stride = sizes[1];
    }
    for (int i = filter->dimensions - 1; i >= 0; i--) {
        filter->sizes[i] = sizes[i];
        if (channels_last && i == 1)
            continue;
        filter->strides[i] = stride;
        stride *= sizes[i];
    }
    return SUCCESS;
}

API status cudnnGetFilterNdDescriptor(const struct tensor *filter, int wanted, int *data_type, int *format,
                                      int *dimensions, int *sizes)
{
    *data_type = filter->data_type;
    *dimensions = filter->dimensions;
    *format =
        filter->dimensions > 1 && filter->strides[1] == 1 && filter->sizes[1] > 1 ? FORMAT_NHWC : FORMAT_NCHW;
    for (int i = 0; i < filter->dimensions && i < wanted; i++)
        sizes[i] = (int)filter->sizes[i];
    return SUCCESS;
}

/* ---- Questions ------------------------------------------------------------------------------- */

void append(struct text *text, const char *format, ...)
{
    va_list arguments;
    for (int attempt = 0; attempt < 2; attempt++) {
        size_t room = text->capacity - text->count;
        va_start(arguments, format);
        int needed = vsnprintf(text->items ? text->items + text->count : NULL, room, format, arguments);
        va_end(arguments);
        if (needed >= 0 && (size_t)needed < room) {
            text->count += (size_t)needed;
            return;
        }
        if (needed < 0 || !array_reserve(text, text->count + (size_t)needed + 1))
            break;
    }
    text->cut = true;
}

void free_text(struct text *text)
{
    free(text->items);
    *text = (struct text){.items = NULL};
}

struct text begin_question(const char *kind)
{
    struct text question = {.items = NULL};
    append(&question, "{\"kind\":\"%s\"", kind);
    return question;
}

void add_number(struct text *question, const char *name, int64_t value)
{
    append(question, ",\"%s\":%lld", name, (long long)value);
}

void add_text(struct text *question, const char *name, const char *value)
{
    append(question, ",\"%s\":\"%s\"", name, value);
}

void add_list(struct text *question, const char *name, const int64_t *values, int count)
{
    append(question, ",\"%s\":[", name);
    for (int i = 0; i < count; i++)
        append(question, i ? ",%lld" : "%lld", (long long)values[i]);
    append(question, "]");
}

void add_tensor(struct text *question, const char *name, const struct tensor *tensor)
{
    append(question, ",\"%s\":{\"data_type\":%d", name, tensor->data_type);
    add_list(question, "sizes", tensor->sizes, tensor->dimensions);
    add_list(question, "strides", tensor->strides, tensor->dimensions);
    append(question, "}");
}

int ask_configurations(struct text *question, struct ghost_configuration *offers, int room)
{
    append(question, "}");
    int count = ghost_ask(question->cut ? "{\"kind\":\"unknown\"}" : question->items, offers, room);
    free_text(question);
    return count;
}

uint64_t ask_workspace(struct text *question)
{
    struct ghost_configuration only = {0};
    return ask_configurations(question, &only, 1) > 0 ? only.workspace : 0;
}
