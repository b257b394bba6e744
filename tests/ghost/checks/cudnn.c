/* cuDNN: descriptors, what is asked about an operation, and the log of work space. */
#include "checks.h"
#include "cudnn.h"

status cudnnCreateTensorDescriptor(void **), cudnnDestroyTensorDescriptor(void *);
status cudnnSetTensorNdDescriptor(void *, int, int, const int *, const int *);
status cudnnGetTensorNdDescriptor(const void *, int, int *, int *, int *, int *);
status cudnnCreateFilterDescriptor(void **), cudnnDestroyFilterDescriptor(void *);
status cudnnSetFilterNdDescriptor(void *, int, int, int, const int *);
status cudnnGetFilterNdDescriptor(const void *, int, int *, int *, int *, int *);
status cudnnBackendCreateDescriptor(int, void **), cudnnBackendDestroyDescriptor(void *);
status cudnnBackendSetAttribute(void *, int, int, int64_t, const void *);
status cudnnBackendGetAttribute(void *, int, int, int64_t, int64_t *, void *);
status cudnnBackendExecute(void *, void *, void *);
status cudnnCreateRNNDescriptor(void **), cudnnDestroyRNNDescriptor(void *);
status cudnnSetRNNDescriptor_v8(void *, int, int, int, int, int, int, int, int, int32_t, int32_t, int32_t,
                                int32_t, void *, uint32_t);
status cudnnGetRNNWeightSpaceSize(void *, void *, size_t *);
status cudnnGetRNNWeightParams(void *, void *, int32_t, size_t, const void *, int32_t, void *, void **,
                               void *, void **);

/* Numbers of cudnn_graph.h that the checks use. */
enum { TENSOR = 14, CONVOLUTION = 1, WEIGHT_GRADIENT = 11, GRAPH = 15, HEURISTICS = 4, CONFIG = 3, PLAN = 5,
       VARIANT_PACK = 16, RELU = 13 };
enum { DATA_TYPE = 1, INT64 = 3, POINTER = 6, DESCRIPTOR = 15 };

void descriptors(void)
{
    void *tensor, *filter;
    int sizes[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, got[12] = {0}, steps[12] = {0};
    int type, dimensions, format;
    cudnnCreateTensorDescriptor(&tensor);
    cudnnSetTensorNdDescriptor(tensor, 2, 4, sizes, sizes);
    cudnnGetTensorNdDescriptor(tensor, 2, &type, &dimensions, got, steps);
    CHECK(type == 2 && dimensions == 4 && got[1] == 2 && got[2] == 0);
    cudnnSetTensorNdDescriptor(tensor, 2, 12, sizes, sizes); /* more than there is room for */
    cudnnGetTensorNdDescriptor(tensor, 12, &type, &dimensions, got, steps);
    CHECK(dimensions == 8 && got[7] == 8 && got[8] == 0);
    cudnnSetTensorNdDescriptor(tensor, 2, -3, sizes, sizes);
    cudnnGetTensorNdDescriptor(tensor, 12, &type, &dimensions, got, steps);
    CHECK(dimensions == 0);
    cudnnDestroyTensorDescriptor(tensor);

    cudnnCreateFilterDescriptor(&filter);
    for (int channels_last = 0; channels_last < 2; channels_last++) {
        cudnnSetFilterNdDescriptor(filter, 0, channels_last, 4, (int[]){8, 4, 3, 5});
        cudnnGetFilterNdDescriptor(filter, 4, &type, &format, &dimensions, got);
        CHECK(format == channels_last && dimensions == 4 && got[0] == 8 && got[1] == 4 && got[3] == 5);
        const int64_t strides[2][4] = {{60, 15, 5, 1}, {60, 1, 20, 4}};
        CHECK(memcmp(((struct tensor *)filter)->strides, strides[channels_last], sizeof *strides) == 0);
    }
    cudnnDestroyFilterDescriptor(filter);
}

/* ---- Questions ------------------------------------------------------------------------------- */

static char last_question[4096];
static int questions;

static uint64_t remember(const char *question)
{
    snprintf(last_question, sizeof last_question, "%s", question);
    questions++;
    return 4096;
}

void question_bounds(void)
{
    const int64_t numbers[MOST_DIMENSIONS] = {INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN,
                                              INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN};
    CHECK(ghost_ask("{}") == 0); /* nobody to answer: 0, and it is known to be assumed */
    CHECK(ghost_gaps_reached(NULL, 0) > 1);
    ghost_answer_with(remember);
    struct question question = question_about("a");
    say_text(&question, "b", "c");
    say_number(&question, "d", -5);
    say_list(&question, "e", (int64_t[]){1, 2}, 2);
    CHECK(asked(&question) == 4096);
    CHECK(strcmp(last_question, "{\"kind\":\"a\",\"b\":\"c\",\"d\":-5,\"e\":[1,2]}") == 0);
    struct question endless = question_about("a");
    for (int i = 0; i < 40; i++)
        say_list(&endless, "f", numbers, MOST_DIMENSIONS);
    CHECK(asked(&endless) == 4096 && strcmp(last_question, "{\"kind\":\"unknown\"}") == 0);
}

static void *made(int type)
{
    void *descriptor;
    CHECK(cudnnBackendCreateDescriptor(type, &descriptor) == SUCCESS);
    return descriptor;
}

static void *tensor_of(const int64_t *sizes, int64_t count)
{
    void *tensor = made(TENSOR);
    cudnnBackendSetAttribute(tensor, 901, DATA_TYPE, 1, &(int){2});
    cudnnBackendSetAttribute(tensor, 902, INT64, count, sizes);
    cudnnBackendSetAttribute(tensor, 903, INT64, count, sizes);
    return tensor;
}

void graph_api(void)
{
    const int64_t sizes[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    configure(GIB);
    ghost_answer_with(remember);
    void *convolution = made(CONVOLUTION), *operation = made(WEIGHT_GRADIENT), *graph = made(GRAPH);
    void *x = tensor_of(sizes, 4), *dw = tensor_of(sizes, 12), *dy = tensor_of(sizes, 3), *relu = made(RELU);
    cudnnBackendSetAttribute(convolution, 106, INT64, 1, &(int64_t){2});
    cudnnBackendSetAttribute(convolution, 105, INT64, 2, (int64_t[]){7, 8});
    cudnnBackendSetAttribute(convolution, 103, INT64, 2, (int64_t[]){5, 6});
    cudnnBackendSetAttribute(convolution, 102, INT64, 2, (int64_t[]){3, 4});
    cudnnBackendSetAttribute(operation, 716, DESCRIPTOR, 1, &x);
    cudnnBackendSetAttribute(operation, 714, DESCRIPTOR, 1, &convolution);
    cudnnBackendSetAttribute(operation, 715, DESCRIPTOR, 1, &dw);
    cudnnBackendSetAttribute(operation, 717, DESCRIPTOR, 1, &dy);
    cudnnBackendSetAttribute(graph, 801, DESCRIPTOR, 2, (void *[]){operation, relu});
    /* What was said is copied: nothing that a graph was made from is needed any more. */
    cudnnBackendDestroyDescriptor(x), cudnnBackendDestroyDescriptor(dw), cudnnBackendDestroyDescriptor(dy);
    cudnnBackendDestroyDescriptor(convolution), cudnnBackendDestroyDescriptor(operation);

    void *heuristics = made(HEURISTICS), *configs[3] = {made(CONFIG), made(CONFIG), made(CONFIG)};
    int64_t found = 0, size = -1;
    cudnnBackendSetAttribute(heuristics, 201, DESCRIPTOR, 1, &graph);
    cudnnBackendGetAttribute(heuristics, 202, DESCRIPTOR, 0, &found, NULL);
    CHECK(found == 2);
    cudnnBackendGetAttribute(heuristics, 202, DESCRIPTOR, 3, &found, configs);
    CHECK(found == 2);
    cudnnBackendDestroyDescriptor(graph), cudnnBackendDestroyDescriptor(heuristics);

    void *plan = made(PLAN), *frugal = made(PLAN), *pack = made(VARIANT_PACK), *memory = allocated(4096);
    cudnnBackendSetAttribute(plan, 401, DESCRIPTOR, 1, &configs[0]);
    cudnnBackendSetAttribute(frugal, 401, DESCRIPTOR, 1, &configs[1]);
    CHECK(questions == 0);
    cudnnBackendGetAttribute(plan, 402, INT64, 1, &found, &size);
    CHECK(size == 4096 && found == 1);
    cudnnBackendGetAttribute(plan, 402, INT64, 1, &found, &size);
    CHECK(questions == 1);
    CHECK(strstr(last_question, "\"operation\":\"weight gradient\""));
    CHECK(strstr(last_question, "\"x\":{\"data_type\":2,\"sizes\":[1,2,3,4],\"strides\":[1,2,3,4]}"));
    CHECK(strstr(last_question, "\"w\":{\"data_type\":2,\"sizes\":[1,2,3,4,5,6,7,8]"));
    CHECK(strstr(last_question, "\"y\":{\"data_type\":2,\"sizes\":[1,2,3]"));
    CHECK(strstr(last_question, "\"padding\":[7,8],\"stride\":[5,6],\"dilation\":[3,4],\"fused\":1}"));
    cudnnBackendGetAttribute(frugal, 402, INT64, 1, &found, &size);
    CHECK(size == 0 && questions == 1);

    struct ghost_space space;
    cudnnBackendSetAttribute(pack, 1003, POINTER, 1, &memory);
    cudnnBackendExecute(NULL, frugal, pack);
    CHECK(ghost_spaces(NULL, 0) == 0);
    ghost_set_label(7);
    cudnnBackendExecute(NULL, plan, pack);
    CHECK(ghost_spaces(&space, 1) == 1);
    CHECK(space.address == (uint64_t)memory && space.size == 4096 && space.label == 7);
    for (int i = 0; i < 3; i++)
        cudnnBackendDestroyDescriptor(configs[i]);
    cudnnBackendDestroyDescriptor(plan), cudnnBackendDestroyDescriptor(frugal);
    cudnnBackendDestroyDescriptor(pack), cudnnBackendDestroyDescriptor(relu), cudaFree(memory);
}

void space_log(void)
{
    struct ghost_space spaces[4];
    ghost_space_used(NULL, 8), ghost_space_used(spaces, 0);
    CHECK(ghost_spaces(NULL, 0) == 0);
    for (uint64_t i = 0; i < 1000; i++)
        for (int again = 0; again < 3; again++)
            ghost_space_used(spaces, 1 + i);
    CHECK(ghost_spaces(spaces, 2) == 1000 && spaces[1].size == 2);
}

/* ---- Recurrent networks ---------------------------------------------------------------------- */

/* Every matrix and bias lies inside the buffer, none over another, and together they fill it. */
void recurrent_weights(void)
{
    enum { RELU_CELL = 0, LSTM = 2, GRU = 3 };
    const struct {
        int cell, bias, directions, skips, projection, layers;
    } nets[] = {{LSTM, 2, 1, 0, 0, 1}, {LSTM, 2, 2, 0, 0, 3}, {LSTM, 2, 2, 0, 3, 2},
                {LSTM, 0, 1, 0, 3, 2}, {GRU, 2, 2, 0, 0, 2},  {GRU, 1, 1, 0, 0, 2},
                {GRU, 3, 1, 1, 0, 2},  {RELU_CELL, 2, 1, 0, 0, 2}};
    void *rnn, *matrix, *bias, *addresses[2];
    cudnnCreateRNNDescriptor(&rnn), cudnnCreateTensorDescriptor(&matrix), cudnnCreateTensorDescriptor(&bias);
    for (size_t n = 0; n < sizeof nets / sizeof *nets; n++) {
        int gates = nets[n].cell == LSTM ? 4 : nets[n].cell == GRU ? 3 : 1;
        int hidden = 5, input = nets[n].skips ? 5 : 7;
        size_t size, filled = 0;
        CHECK(cudnnSetRNNDescriptor_v8(rnn, 0, nets[n].cell, nets[n].bias, nets[n].directions - 1,
                                       nets[n].skips, 0, 0, 0, input, hidden, nets[n].projection,
                                       nets[n].layers, NULL, 0) == SUCCESS);
        cudnnGetRNNWeightSpaceSize(NULL, rnn, &size);
        char *space = calloc(1, size);
        for (int layer = 0; layer < nets[n].layers * nets[n].directions; layer++)
            for (int linear = 0; linear < 2 * gates + (nets[n].cell == LSTM); linear++) {
                struct tensor *tensors[2] = {matrix, bias};
                CHECK(cudnnGetRNNWeightParams(NULL, rnn, layer, size, space, linear, matrix, &addresses[0],
                                              bias, &addresses[1]) == SUCCESS);
                for (int which = 0; which < 2; which++) {
                    int64_t *sizes = tensors[which]->sizes, bytes = 4 * sizes[0] * sizes[1] * sizes[2];
                    CHECK(!addresses[which] == (tensors[which]->dimensions == 0));
                    for (char *at = addresses[which]; at && at < (char *)addresses[which] + bytes; at++) {
                        CHECK(*at == 0);
                        *at = 1;
                        filled++;
                    }
                }
            }
        CHECK(filled == size);
        const struct {
            int layer, linear;
            size_t size;
        } refused[] = {{-1, 0, size}, {99, 0, size}, {0, 9, size}, {0, -1, size}, {0, 0, size - 1}};
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
            CHECK(cudnnGetRNNWeightParams(NULL, rnn, refused[i].layer, refused[i].size, space,
                                          refused[i].linear, NULL, NULL, NULL, NULL) == DNN_BAD_PARAM);
        free(space);
    }
    CHECK(cudnnSetRNNDescriptor_v8(rnn, 0, 4, 2, 0, 0, 0, 0, 0, 7, 5, 0, 1, NULL, 0) == DNN_BAD_PARAM);
    CHECK(cudnnSetRNNDescriptor_v8(rnn, 0, 2, 2, 0, 0, 0, 0, 0, 7, 5, 6, 1, NULL, 0) == DNN_BAD_PARAM);
    cudnnDestroyRNNDescriptor(rnn), cudnnDestroyTensorDescriptor(matrix), cudnnDestroyTensorDescriptor(bias);
}
