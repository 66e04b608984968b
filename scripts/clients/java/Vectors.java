import com.google.protobuf.CodedOutputStream;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import tinkerpool.v1.DataType;
import tinkerpool.v1.Tensor;

/** Checks the vectors of the wire format (tests/data/wire): java Vectors vectors.tsv. */
final class Vectors {
  private Vectors() {}

  public static void main(String[] arguments) throws Exception {
    List<String> lines = Files.readAllLines(Path.of(arguments[0]));
    String[] columns = lines.get(0).split("\t", -1);
    int numWrong = 0;
    for (String line : lines.subList(1, lines.size())) {
      Map<String, String> vector = new HashMap<>();
      String[] cells = line.split("\t", -1);
      for (int index = 0; index < columns.length; index++) {
        vector.put(columns[index], cells[index]);
      }
      for (String fault : faults(vector)) {
        System.err.println(vector.get("name") + ": " + fault);
        numWrong++;
      }
    }
    System.out.println(lines.size() - 1 + " vectors");
    System.exit(numWrong == 0 ? 0 : 1);
  }

  /** Returns what of a vector is wrong. */
  private static List<String> faults(Map<String, String> vector) throws Exception {
    byte[] wanted = HexFormat.of().parseHex(vector.get("bytes"));
    // A message's class has the full name of the message: the files name tinkerpool.v1 as their package for Java.
    Message none = (Message) Class.forName(vector.get("message")).getMethod("getDefaultInstance").invoke(null);
    Message decoded = none.newBuilderForType().mergeFrom(wanted).build();
    Message.Builder read = none.newBuilderForType();
    JsonFormat.parser().merge(vector.get("values"), read);
    List<String> found = new ArrayList<>();
    if (!read.build().equals(decoded)) {
      found.add("the values differ");
    }
    if (!Arrays.equals(encoded(decoded), wanted)) {
      found.add("the encoded message has other bytes");
    }
    if (decoded instanceof Tensor tensor) {
      String elements = vector.get("elements");
      if (!String.join(",", Tensors.texts(tensor)).equals(elements)) {
        found.add("the elements differ");
      }
      if (!again(tensor.getDtype(), elements).getData().equals(tensor.getData())) {
        found.add("a tensor of the elements differs");
      }
    }
    MessageDigest sha256 = MessageDigest.getInstance("SHA-256");
    sha256.update((vector.get("kind") + "\0").getBytes(StandardCharsets.US_ASCII));
    String digest = HexFormat.of().formatHex(sha256.digest(wanted));
    if (!List.of("-", digest).contains(vector.get("hash"))) {
      found.add("the hash differs");
    }
    return found;
  }

  private static byte[] encoded(Message message) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    CodedOutputStream output = CodedOutputStream.newInstance(bytes);
    output.useDeterministicSerialization();
    message.writeTo(output);
    output.flush();
    return bytes.toByteArray();
  }

  /** Returns a tensor of elements as text, separated by commas. */
  private static Tensor again(DataType dtype, String elements) {
    List<String> texts = elements.isEmpty() ? List.of() : List.of(elements.split(","));
    return Tensors.of(dtype, texts.stream().map(text -> value(dtype, text)).collect(Collectors.toList()));
  }

  private static Number value(DataType dtype, String text) {
    if (dtype == DataType.DATA_TYPE_FLOAT32) {
      return Float.intBitsToFloat(Integer.parseUnsignedInt(text, 16));
    }
    return Long.valueOf(text);
  }
}
