import com.google.protobuf.ByteString;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.List;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import tinkerpool.v1.DataType;
import tinkerpool.v1.Tensor;

/** Tensors: little-endian bytes with type and shape. */
final class Tensors {
  private Tensors() {}

  /** Returns numbers as a tensor of one dimension. */
  static Tensor of(DataType dtype, List<? extends Number> values) {
    ByteBuffer data = ByteBuffer.allocate(size(dtype) * values.size()).order(ByteOrder.LITTLE_ENDIAN);
    for (Number value : values) {
      switch (dtype) {
        case DATA_TYPE_FLOAT32 -> data.putFloat(value.floatValue());
        case DATA_TYPE_INT32 -> data.putInt(value.intValue());
        case DATA_TYPE_INT64 -> data.putLong(value.longValue());
        default -> throw new IllegalArgumentException("no tensor has the type " + dtype);
      }
    }
    return Tensor.newBuilder().setData(ByteString.copyFrom(data.flip())).setDtype(dtype).addShape(values.size()).build();
  }

  /** Returns the elements of a tensor as text: integers in decimal, floats as their bits in hexadecimal. */
  static List<String> texts(Tensor tensor) {
    ByteBuffer data = tensor.getData().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
    DataType dtype = tensor.getDtype();
    return IntStream.range(0, data.remaining() / size(dtype)).mapToObj(at -> switch (dtype) {
      case DATA_TYPE_FLOAT32 -> String.format("%08x", data.getInt(4 * at));
      case DATA_TYPE_INT32 -> String.valueOf(data.getInt(4 * at));
      default -> String.valueOf(data.getLong(8 * at));
    }).collect(Collectors.toList());
  }

  private static int size(DataType dtype) {
    return dtype == DataType.DATA_TYPE_INT64 ? 8 : 4;
  }
}
