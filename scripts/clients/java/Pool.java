import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptors;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.net.URI;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import tinkerpool.v1.AdapterServiceGrpc;
import tinkerpool.v1.CheckpointServiceGrpc;
import tinkerpool.v1.Operation;
import tinkerpool.v1.OperationServiceGrpc;
import tinkerpool.v1.OperationState;
import tinkerpool.v1.SamplingServiceGrpc;
import tinkerpool.v1.SessionServiceGrpc;
import tinkerpool.v1.TrainingServiceGrpc;
import tinkerpool.v1.WaitOperationsRequest;

/** A connection to a pool: stubs whose calls carry the key, and calls that are repeated. */
final class Pool implements AutoCloseable {
  private static final long CALL_S = 30;
  /** Codes of a call that the network or a stop of the pool ended: without a reason of the pool's. */
  private static final Set<Status.Code> LOST = Set.of(
      Status.Code.UNAVAILABLE, Status.Code.DEADLINE_EXCEEDED, Status.Code.CANCELLED, Status.Code.INTERNAL);

  private final ManagedChannel connection;
  private final Channel channel;

  /** {@code url}: http://host:port, or https:// for TLS. {@code trusted}: a PEM file; null: the JVM's authorities. */
  Pool(String url, String apiKey, String trusted) throws IOException {
    URI address = URI.create(url);
    ChannelCredentials credentials = InsecureChannelCredentials.create();
    if (address.getScheme().equals("https")) {
      TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder();
      credentials = (trusted == null ? tls : tls.trustManager(new File(trusted))).build();
    }
    connection = Grpc.newChannelBuilder(address.getAuthority(), credentials)
        .maxInboundMessageSize(64 << 20)
        .keepAliveTime(30, TimeUnit.SECONDS)
        .disableRetry()
        .build();
    Metadata key = new Metadata();
    key.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + apiKey);
    channel = ClientInterceptors.intercept(connection, MetadataUtils.newAttachHeadersInterceptor(key));
  }

  @Override
  public void close() {
    connection.shutdownNow();
  }

  SessionServiceGrpc.SessionServiceBlockingStub sessions() {
    return SessionServiceGrpc.newBlockingStub(channel).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  AdapterServiceGrpc.AdapterServiceBlockingStub adapters() {
    return AdapterServiceGrpc.newBlockingStub(channel).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  TrainingServiceGrpc.TrainingServiceBlockingStub training() {
    return TrainingServiceGrpc.newBlockingStub(channel).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  CheckpointServiceGrpc.CheckpointServiceBlockingStub checkpoints() {
    return CheckpointServiceGrpc.newBlockingStub(channel).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  SamplingServiceGrpc.SamplingServiceBlockingStub sampling() {
    return SamplingServiceGrpc.newBlockingStub(channel).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  /** Waits for operations over a stream, and returns them by name. After a broken stream asks for what is missing. */
  Map<String, Operation> finished(List<String> names) {
    Map<String, Operation> found = new HashMap<>();
    return repeated("WaitOperations", () -> {
      List<String> missing = new ArrayList<>(names);
      missing.removeAll(found.keySet());
      WaitOperationsRequest request = WaitOperationsRequest.newBuilder().addAllNames(missing).build();
      OperationServiceGrpc.newBlockingStub(channel).waitOperations(request).forEachRemaining(response -> {
        Operation operation = response.getOperation();
        if (operation.getState() == OperationState.OPERATION_STATE_FAILED) {
          throw new IllegalStateException(operation.getName() + ": " + operation.getError());
        }
        found.put(operation.getName(), operation);
      });
      return found;
    });
  }

  /**
   * Attempts until it succeeds: after the delay that a refusal tells, or growing pauses without a connection. The same
   * request again is safe: it has a seq or a request_id, or changes nothing.
   */
  <T> T repeated(String name, Supplier<T> attempt) {
    for (double pauseS = 0.2; ; pauseS = Math.min(2 * pauseS, 2)) {
      try {
        return attempt.get();
      } catch (StatusRuntimeException error) {
        RetryInfo retry = detail(error, RetryInfo.class);
        ErrorInfo info = detail(error, ErrorInfo.class);
        if (retry == null && (info != null || !LOST.contains(error.getStatus().getCode()))) {
          throw error;
        }
        double waitS = pauseS;
        if (retry != null) {
          waitS = retry.getRetryDelay().getSeconds() + retry.getRetryDelay().getNanos() / 1e9;
        }
        waitS *= 1 + ThreadLocalRandom.current().nextDouble() / 4;
        String reason = info == null ? error.getStatus().getCode().name() : info.getReason();
        System.err.printf("%s: %s; again in %.1f s%n", name, reason, waitS);
        sleep(waitS);
        connection.resetConnectBackoff(); // else a channel waits up to two minutes before it connects again
      }
    }
  }

  /** Returns a detail of a refusal; null if it has none of this type. */
  static <T extends com.google.protobuf.Message> T detail(StatusRuntimeException error, Class<T> type) {
    try {
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(type)) {
          return detail.unpack(type);
        }
      }
      return null;
    } catch (InvalidProtocolBufferException broken) {
      throw new IllegalStateException(broken);
    }
  }

  private static void sleep(double seconds) {
    try {
      Thread.sleep((long) Math.ceil(seconds * 1000));
    } catch (InterruptedException interrupted) {
      throw new IllegalStateException(interrupted);
    }
  }
}
