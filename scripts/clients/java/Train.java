import com.google.rpc.ErrorInfo;
import io.grpc.StatusRuntimeException;
import java.io.ByteArrayOutputStream;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;
import tinkerpool.v1.*;

/** Trains an adapter, samples from it and exports it. Prints results; floats also as the bits that the contract carries. */
final class Train {
  private static final List<Integer> TOKENS = List.of(459, 342, 343, 386, 505, 351, 77, 260);
  private static final List<Float> WEIGHTS = List.of(1f, 0.5f, 0.25f, 1f, 0.5f, 0.25f, 1f);
  private static final int NUM_STEPS = 10;
  private static final int NUM_EARLY = 6;

  private final Pool pool;

  private Train(Pool pool) {
    this.pool = pool;
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, String> environment = System.getenv();
    String url = environment.get("TINKERPOOL_BASE_URL");
    try (Pool pool = new Pool(url, environment.get("TINKERPOOL_API_KEY"), environment.get("TINKERPOOL_CERTIFICATE"))) {
      new Train(pool).run();
    }
  }

  private void run() throws Exception {
    GetCapabilitiesRequest none = GetCapabilitiesRequest.getDefaultInstance();
    String baseModel = pool.repeated("GetCapabilities", () -> pool.sessions().getCapabilities(none)).getBaseModels(0).getName();
    System.out.println("model " + baseModel);
    // A session ends ten minutes after its last heartbeat: this program sends none, and finishes before that.
    CreateSessionRequest newSession = CreateSessionRequest.newBuilder().setRequestId(newId()).build();
    String sessionId = pool.repeated("CreateSession", () -> pool.sessions().createSession(newSession)).getSession().getSessionId();
    CreateAdapterRequest invalid = CreateAdapterRequest.newBuilder()
        .setSessionId(sessionId).setRequestId(newId()).setBaseModel(baseModel).setRank(3).setSeed(7).build();
    try {
      pool.repeated("CreateAdapter", () -> pool.adapters().createAdapter(invalid));
    } catch (StatusRuntimeException error) {
      ErrorInfo info = Pool.detail(error, ErrorInfo.class);
      System.out.printf("refused %s %s %s%n", error.getStatus().getCode(), info.getReason(), info.getDomain());
    }
    CreateAdapterRequest newAdapter = invalid.toBuilder().setRank(8).build();
    String adapterId = pool.repeated("CreateAdapter", () -> pool.adapters().createAdapter(newAdapter)).getAdapter().getAdapterId();

    train(adapterId);

    int seq = 2 * NUM_STEPS + 1;
    SaveStateRequest saveState = SaveStateRequest.newBuilder().setAdapterId(adapterId).setSeq(seq).setName("state").build();
    String state = pool.repeated("SaveState", () -> pool.checkpoints().saveState(saveState)).getOperation().getName();
    SaveWeightsForSamplerRequest saveWeights = SaveWeightsForSamplerRequest.newBuilder()
        .setAdapterId(adapterId).setSeq(seq + 1).setName("final").build();
    String weights = pool.repeated("SaveWeightsForSampler", () -> pool.checkpoints().saveWeightsForSampler(saveWeights))
        .getOperation().getName();
    String path = pool.finished(List.of(state, weights)).get(weights).getSaveWeightsForSampler().getPath();
    CreateSamplerRequest newSampler = CreateSamplerRequest.newBuilder()
        .setSessionId(sessionId).setRequestId(newId()).setModelPath(path).build();
    sample(pool.repeated("CreateSampler", () -> pool.sampling().createSampler(newSampler)).getSampler().getSamplerId());

    ExportCheckpointRequest export = ExportCheckpointRequest.newBuilder().setPath(path).build();
    byte[] archive = pool.repeated("ExportCheckpoint", () -> {
      ByteArrayOutputStream pieces = new ByteArrayOutputStream();
      pool.checkpoints().exportCheckpoint(export).forEachRemaining(piece -> pieces.writeBytes(piece.getData().toByteArray()));
      return pieces.toByteArray();
    });
    String digest = HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(archive));
    System.out.printf("export %d bytes sha256 %s%n", archive.length, digest);
    ListCheckpointsRequest listing = ListCheckpointsRequest.newBuilder().setAdapterId(adapterId).build();
    for (Checkpoint found :
        pool.repeated("ListCheckpoints", () -> pool.checkpoints().listCheckpoints(listing)).getCheckpointsList()) {
      String name = found.getPath().replace("tinker://" + adapterId + "/", "");
      System.out.printf("checkpoint %s seq %d rank %d sha256 %s%n", name, found.getSeq(), found.getRank(), found.getSha256());
    }
    FinishSessionRequest end = FinishSessionRequest.newBuilder().setSessionId(sessionId).build();
    pool.repeated("FinishSession", () -> pool.sessions().finishSession(end));
    System.out.println("done");
  }

  /** Takes the steps, all of them in flight at a time, and prints what they gave. */
  private void train(String adapterId) {
    // The pool takes steps in any order and runs them by seq: sent last first, none can finish before the first is sent.
    List<String> early = new ArrayList<>();
    List<String> late = new ArrayList<>();
    for (int step = NUM_STEPS; step > NUM_STEPS - NUM_EARLY; step--) {
      early.addAll(send(adapterId, step));
    }
    CompletableFuture<Map<String, Operation>> waiting = CompletableFuture.supplyAsync(() -> pool.finished(early), Train::inBackground);
    System.out.println("sent " + NUM_EARLY + " steps");
    for (int step = NUM_STEPS - NUM_EARLY; step > 0; step--) {
      late.addAll(send(adapterId, step));
    }
    Map<String, Operation> results = waiting.join();
    results.putAll(pool.finished(late));
    if (!send(adapterId, NUM_STEPS).equals(early.subList(0, 2))) {
      throw new IllegalStateException("the same seq again gave another operation");
    }
    for (int step = 1; step <= NUM_STEPS; step++) {
      ForwardBackwardResult forward = results.get(adapterId + ":" + (2 * step - 1)).getForwardBackward();
      double norm = results.get(adapterId + ":" + 2 * step).getOptimStep().getMetricsOrThrow("grad_norm:last");
      double loss = forward.getMetricsOrThrow("loss:sum");
      System.out.printf("step %d loss %.4f %s grad_norm %s%n", step, loss, bits(loss), bits(norm));
      System.out.printf("step %d logprobs %s%n", step, String.join(" ", Tensors.texts(forward.getLogprobs(0))));
    }
  }

  /** Runs a task on a thread that does not keep the program from ending after an error. */
  private static void inBackground(Runnable task) {
    Thread thread = new Thread(task);
    thread.setDaemon(true);
    thread.start();
  }

  /** Sends a step, and returns the names of its two operations. */
  private List<String> send(String adapterId, int step) {
    Datum datum = Datum.newBuilder()
        .setTokens(int32(0, TOKENS.size() - 1))
        .putLossInputs("target_tokens", int32(1, TOKENS.size()))
        .putLossInputs("weights", Tensors.of(DataType.DATA_TYPE_FLOAT32, WEIGHTS))
        .build();
    TrainStepRequest request = TrainStepRequest.newBuilder()
        .setAdapterId(adapterId)
        .setSeq(2 * step - 1)
        .addData(datum)
        .setLossFunction(LossFunction.LOSS_FUNCTION_CROSS_ENTROPY)
        .setAdam(AdamParams.newBuilder().setLearningRate(2e-3))
        .build();
    TrainStepResponse sent = pool.repeated("TrainStep", () -> pool.training().trainStep(request));
    return List.of(sent.getForwardBackward().getName(), sent.getOptimStep().getName());
  }

  /** Samples with a stream, and prints the sequences. */
  private void sample(String samplerId) {
    SamplingParams params = SamplingParams.newBuilder()
        .setMaxTokens(8).setTemperature(0.75f).setSeed(11).setStop(StopCondition.getDefaultInstance()).build();
    SampleRequest request = SampleRequest.newBuilder()
        .setSamplerId(samplerId).setSeq(1).setPrompt(int32(0, 3)).setNumSamples(2).setParams(params).build();
    List<SampledToken> streamed = new ArrayList<>();
    SampleResult result = pool.repeated("StreamSample", () -> {
      streamed.clear();
      SampleResult[] last = new SampleResult[1];
      pool.sampling().streamSample(StreamSampleRequest.newBuilder().setRequest(request).build()).forEachRemaining(event -> {
        if (event.hasToken()) {
          streamed.add(event.getToken());
        }
        last[0] = event.getOperation().getSample();
      });
      return last[0];
    });
    for (int index = 0; index < result.getSequencesCount(); index++) {
      SampledSequence sequence = result.getSequences(index);
      int at = index;
      String drawn = String.join(" ", Tensors.texts(sequence.getTokens()));
      String got = streamed.stream().filter(token -> token.getSequenceIndex() == at)
          .map(token -> String.valueOf(token.getToken())).collect(Collectors.joining(" "));
      if (!got.equals(drawn)) {
        throw new IllegalStateException(got + " was streamed, and " + drawn + " is the result");
      }
      System.out.printf("sample %d tokens %s%n", index, drawn);
      System.out.printf("sample %d logprobs %s%n", index, String.join(" ", Tensors.texts(sequence.getLogprobs())));
    }
  }

  private static Tensor int32(int from, int to) {
    return Tensors.of(DataType.DATA_TYPE_INT32, TOKENS.subList(from, to));
  }

  private static String bits(double value) {
    return String.format("%016x", Double.doubleToRawLongBits(value));
  }

  private static String newId() {
    return UUID.randomUUID().toString();
  }
}
