/* Recurrent networks (RNN, LSTM, GRU) and the dropout between their layers.
 *
 * The weights of all layers are in one buffer that PyTorch allocates and slices: this file defines where
 * each begins. Matrices come first, biases last; within each of the two pseudo-layer after pseudo-layer (a
 * layer, or one direction of it), gate after gate, input weights before recurrent ones, then the
 * projection:
 *
 *     | W0 W1 W2 W3 | R0 R1 R2 R3 | P | next pseudo-layer ... || b0 ... b3 | c0 ... c3 | next ...
 *
 * PyTorch checks the part that it depends on: gates of one kind follow each other (get_parameters in
 * aten/src/ATen/native/cudnn/RNN.cpp). There is no padding between them.
 */
#include "libraries/cudnn.h"

/* Source: cudnn_adv.h 9.24. */
enum cell { CELL_RELU = 0, CELL_TANH = 1, CELL_LSTM = 2, CELL_GRU = 3 };
enum bias { BIAS_NONE = 0, BIAS_INPUT = 1, BIAS_BOTH = 2, BIAS_RECURRENT = 3 };
enum layout { PACKED = 1 };
enum { LINEAR_INPUT = 0, SKIP_INPUT = 1 };

struct recurrent {
    int algorithm, cell, bias, bidirectional, skips_input, data_type;
    int64_t input, hidden, projection, layers; /* projection: `hidden` where there is none */
};

/* A batch of sequences. */
struct sequences {
    int data_type, layout;
    int64_t longest, batch, vector, elements; /* elements: vectors in the buffer */
};

DESCRIPTOR(RNN, struct recurrent)
DESCRIPTOR(RNNData, struct sequences)
DESCRIPTOR(Dropout, char)

API status cudnnSetRNNDescriptor_v8(struct recurrent *rnn, int algorithm, int cell, int bias,
                                    int bidirectional, int input_mode, int data_type, int math_precision,
                                    int math_type, int32_t input, int32_t hidden, int32_t projection,
                                    int32_t layers, void *dropout, uint32_t flags)
{
    bool understood = cell >= CELL_RELU && cell <= CELL_GRU && bias >= BIAS_NONE && bias <= BIAS_RECURRENT &&
                      input > 0 && hidden > 0 && layers > 0 && projection >= 0 && projection <= hidden;
    if (!understood)
        return DNN_BAD_PARAM;
    *rnn = (struct recurrent){
        .algorithm = algorithm,
        .cell = cell,
        .bias = bias,
        .bidirectional = bidirectional != 0,
        .skips_input = input_mode == SKIP_INPUT,
        .data_type = data_type,
        .input = input,
        .hidden = hidden,
        .projection = projection ? projection : hidden,
        .layers = layers,
    };
    return SUCCESS;
}

API status cudnnSetRNNDataDescriptor(struct sequences *sequences, int data_type, int layout, int longest,
                                     int batch, int vector, const int *lengths, void *filling)
{
    *sequences = (struct sequences){data_type, layout, longest, batch, vector, (int64_t)longest * batch};
    if (layout != PACKED)
        return SUCCESS;
    sequences->elements = 0;
    for (int i = 0; i < batch; i++)
        sequences->elements += lengths[i];
    return SUCCESS;
}

/* ---- Weights --------------------------------------------------------------------------------- */

static int64_t gates_of(const struct recurrent *rnn)
{
    return rnn->cell == CELL_LSTM ? 4 : rnn->cell == CELL_GRU ? 3 : 1;
}

static int64_t directions_of(const struct recurrent *rnn) { return rnn->bidirectional ? 2 : 1; }

static bool is_projected(const struct recurrent *rnn) { return rnn->projection < rnn->hidden; }

/* The length of the vectors that a pseudo-layer reads from the layer below; 0 if it uses them unchanged. */
static int64_t input_of(const struct recurrent *rnn, int64_t pseudo_layer)
{
    if (pseudo_layer >= directions_of(rnn))
        return rnn->projection * directions_of(rnn);
    return rnn->skips_input ? 0 : rnn->input;
}

static int64_t matrices_of(const struct recurrent *rnn, int64_t pseudo_layer)
{
    int64_t gate = rnn->hidden * (input_of(rnn, pseudo_layer) + rnn->projection);
    return gates_of(rnn) * gate + (is_projected(rnn) ? rnn->hidden * rnn->projection : 0);
}

static int64_t biases_of(const struct recurrent *rnn)
{
    int64_t each = rnn->bias == BIAS_NONE ? 0 : rnn->bias == BIAS_BOTH ? 2 : 1;
    return each * gates_of(rnn) * rnn->hidden;
}

/* Elements of the matrices of every pseudo-layer before this one. */
static int64_t matrices_before(const struct recurrent *rnn, int64_t pseudo_layer)
{
    int64_t elements = 0;
    for (int64_t i = 0; i < pseudo_layer; i++)
        elements += matrices_of(rnn, i);
    return elements;
}

static int64_t pseudo_layers_of(const struct recurrent *rnn) { return rnn->layers * directions_of(rnn); }

/* Source: cudnn_graph.h, cudnnDataType_t: double is 1, half 2, bfloat16 9; float is 0. */
static int64_t bytes_of(int data_type)
{
    return data_type == 1 ? 8 : data_type == 2 || data_type == 9 ? 2 : 4;
}

static int64_t weights_of(const struct recurrent *rnn)
{
    int64_t matrices = matrices_before(rnn, pseudo_layers_of(rnn));
    return matrices + pseudo_layers_of(rnn) * biases_of(rnn);
}

ENTRY(cudnnGetRNNWeightSpaceSize(void *handle, struct recurrent *rnn, size_t *size),
      *size = (size_t)(weights_of(rnn) * bytes_of(rnn->data_type)))

/* Set a descriptor to a matrix of one page, and its address; both are empty if there is no such matrix. */
static void set_weight(struct tensor *tensor, void **address, const struct recurrent *rnn, const char *space,
                       int64_t offset, int64_t rows, int64_t columns)
{
    bool there = rows > 0 && columns > 0;
    if (tensor) {
        *tensor = (struct tensor){.data_type = rnn->data_type, .dimensions = there ? 3 : 0};
        if (there) {
            tensor->sizes[0] = 1, tensor->sizes[1] = rows, tensor->sizes[2] = columns;
            tensor->strides[0] = rows * columns, tensor->strides[1] = columns, tensor->strides[2] = 1;
        }
    }
    if (address)
        *address = there ? (void *)(space + offset * bytes_of(rnn->data_type)) : NULL;
}

API status cudnnGetRNNWeightParams(void *handle, struct recurrent *rnn, int32_t pseudo_layer,
                                   size_t weight_space_size, const void *weight_space, int32_t linear,
                                   struct tensor *matrix, void **matrix_address, struct tensor *bias,
                                   void **bias_address)
{
    int64_t gates = gates_of(rnn), input = input_of(rnn, pseudo_layer);
    bool is_projection = linear == 2 * gates && rnn->cell == CELL_LSTM;
    if (pseudo_layer < 0 || pseudo_layer >= pseudo_layers_of(rnn) || linear < 0 ||
        (linear >= 2 * gates && !is_projection) ||
        weight_space_size < (size_t)(weights_of(rnn) * bytes_of(rnn->data_type)))
        return DNN_BAD_PARAM;
    int64_t offset = matrices_before(rnn, pseudo_layer), rows = rnn->hidden, columns;
    bool recurrent = linear >= gates;
    if (is_projection) {
        offset += gates * rnn->hidden * (input + rnn->projection);
        rows = is_projected(rnn) ? rnn->projection : 0;
        columns = rnn->hidden;
    } else if (recurrent) {
        offset += rnn->hidden * (gates * input + (linear - gates) * rnn->projection);
        columns = rnn->projection;
    } else {
        offset += linear * rnn->hidden * input;
        columns = input;
    }
    set_weight(matrix, matrix_address, rnn, weight_space, offset, rows, columns);

    /* A single bias vector per gate is counted either with the input or with the recurrent weights. */
    bool has_bias =
        !is_projection && (rnn->bias == BIAS_BOTH || rnn->bias == (recurrent ? BIAS_RECURRENT : BIAS_INPUT));
    int64_t gate = recurrent && rnn->bias != BIAS_BOTH ? linear - gates : linear;
    int64_t biases = matrices_before(rnn, pseudo_layers_of(rnn)) + pseudo_layer * biases_of(rnn);
    set_weight(bias, bias_address, rnn, weight_space, biases + gate * rnn->hidden, has_bias ? rnn->hidden : 0,
               1);
    return SUCCESS;
}

/* ---- Work and reserve space ------------------------------------------------------------------ */

static uint64_t recurrent_space(const char *space, const struct recurrent *rnn,
                                const struct sequences *sequences, int training)
{
    struct text question = begin_question("recurrent");
    add_text(&question, "space", space);
    add_number(&question, "training", training);
    add_number(&question, "algorithm", rnn->algorithm);
    add_number(&question, "cell", rnn->cell);
    add_number(&question, "bytes", bytes_of(rnn->data_type));
    add_number(&question, "input", rnn->input);
    add_number(&question, "hidden", rnn->hidden);
    add_number(&question, "projection", rnn->projection);
    add_number(&question, "layers", rnn->layers);
    add_number(&question, "directions", directions_of(rnn));
    add_number(&question, "batch", sequences->batch);
    add_number(&question, "longest", sequences->longest);
    add_number(&question, "elements", sequences->elements);
    add_number(&question, "matrices", matrices_before(rnn, pseudo_layers_of(rnn)));
    return ask_workspace(&question);
}

API status cudnnGetRNNTempSpaceSizes(void *handle, struct recurrent *rnn, int training,
                                     struct sequences *sequences, size_t *work, size_t *reserve)
{
    if (work)
        *work = (size_t)recurrent_space("work", rnn, sequences, training);
    if (reserve)
        *reserve = training ? (size_t)recurrent_space("reserve", rnn, sequences, training) : 0;
    return SUCCESS;
}

API status cudnnRNNForward(void *handle, void *rnn, int training, const int32_t *lengths, void *x_layout,
                           const void *x, void *y_layout, void *y, void *h_layout, const void *hx, void *hy,
                           void *c_layout, const void *cx, void *cy, size_t weights_size, const void *weights,
                           size_t work_size, void *work, size_t reserve_size, void *reserve)
{
    COUNT(cudnn_calls);
    ghost_workspace_used(work, work_size);
    ghost_workspace_used(reserve, reserve_size);
    return (status)ghost_stub_called();
}

API status cudnnRNNBackwardData_v8(void *handle, void *rnn, const int32_t *lengths, void *y_layout,
                                   const void *y, const void *dy, void *x_layout, void *dx, void *h_layout,
                                   const void *hx, const void *dhy, void *dhx, void *c_layout, const void *cx,
                                   const void *dcy, void *dcx, size_t weights_size, const void *weights,
                                   size_t work_size, void *work, size_t reserve_size, void *reserve)
{
    COUNT(cudnn_calls);
    ghost_workspace_used(work, work_size);
    return (status)ghost_stub_called();
}

API status cudnnRNNBackwardWeights_v8(void *handle, void *rnn, int add, const int32_t *lengths,
                                      void *x_layout, const void *x, void *h_layout, const void *hx,
                                      void *y_layout, const void *y, size_t weights_size, void *dweights,
                                      size_t work_size, void *work, size_t reserve_size, void *reserve)
{
    COUNT(cudnn_calls);
    ghost_workspace_used(work, work_size);
    return (status)ghost_stub_called();
}

/* ---- Dropout --------------------------------------------------------------------------------- */

API status cudnnDropoutGetStatesSize(void *handle, size_t *size)
{
    struct text question = begin_question("dropout");
    add_number(&question, "multiprocessors", ghost_spec.multiprocessors);
    add_number(&question, "threads", ghost_spec.threads_per_multiprocessor);
    *size = (size_t)ask_workspace(&question);
    return SUCCESS;
}

API status cudnnSetDropoutDescriptor(void *descriptor, void *handle, float probability, void *states,
                                     size_t size, unsigned long long seed)
{
    ghost_workspace_used(states, size);
    return (status)ghost_stub_called();
}
