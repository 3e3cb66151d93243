/* Loads a SavedModel by TensorFlow's C API, which calls the loader that TensorFlow
 * Serving calls, and prints what it predicts, a number a line.
 *
 *     predict FOLDER INPUT OUTPUT INDEX FLOATS_FILE DIMENSION...
 *
 * INPUT and OUTPUT are operations of the graph, INDEX the place among OUTPUT's tensors;
 * the file has the rows as float32.
 */
#include <stdio.h>
#include <stdlib.h>
#include <tensorflow/c/c_api.h>

enum { MOST_DIMENSIONS = 8 };

static void fail(const char *what, const char *why) {
  fprintf(stderr, "predict: %s: %s\n", what, why);
  exit(1);
}

static void check(const TF_Status *status, const char *what) {
  if (TF_GetCode(status) != TF_OK) fail(what, TF_Message(status));
}

static TF_Tensor *rows_of(const char *path, int count, char **arguments) {
  int64_t dimensions[MOST_DIMENSIONS];
  size_t bytes = sizeof(float);
  if (count > MOST_DIMENSIONS) fail(path, "too many dimensions");
  for (int i = 0; i < count; i++) {
    dimensions[i] = atoll(arguments[i]);
    bytes *= (size_t)dimensions[i];
  }
  TF_Tensor *rows = TF_AllocateTensor(TF_FLOAT, dimensions, count, bytes);
  FILE *file = fopen(path, "rb");
  if (!file || fread(TF_TensorData(rows), 1, bytes, file) != bytes)
    fail(path, "cannot be read");
  fclose(file);
  return rows;
}

int main(int argc, char **argv) {
  if (argc < 7) fail("usage", "FOLDER INPUT OUTPUT INDEX FLOATS_FILE DIMENSION...");
  const char *tags[] = {"serve"};
  TF_Status *status = TF_NewStatus();
  TF_Graph *graph = TF_NewGraph();
  TF_SessionOptions *options = TF_NewSessionOptions();
  TF_Session *session = TF_LoadSessionFromSavedModel(
      options, NULL, argv[1], tags, 1, graph, NULL, status);
  check(status, argv[1]);

  TF_Output input = {TF_GraphOperationByName(graph, argv[2]), 0};
  TF_Output output = {TF_GraphOperationByName(graph, argv[3]), atoi(argv[4])};
  if (!input.oper) fail(argv[2], "no such operation");
  if (!output.oper) fail(argv[3], "no such operation");
  TF_Tensor *rows = rows_of(argv[5], argc - 6, argv + 6), *predicted = NULL;
  TF_SessionRun(session, NULL, &input, &rows, 1, &output, &predicted, 1, NULL, 0, NULL,
                status);
  check(status, "TF_SessionRun");
  if (TF_TensorType(predicted) != TF_FLOAT) fail(argv[3], "not float32");
  const float *numbers = TF_TensorData(predicted);
  for (int64_t i = 0; i < TF_TensorElementCount(predicted); i++)
    printf("%.9g\n", numbers[i]);

  TF_DeleteTensor(rows);
  TF_DeleteTensor(predicted);
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteSessionOptions(options);
  TF_DeleteGraph(graph);
  TF_DeleteStatus(status);
  return 0;
}
