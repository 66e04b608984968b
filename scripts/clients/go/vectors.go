package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log"
	"math"
	"os"
	"strconv"
	"strings"

	pb "example.com/train/gen/tinkerpool/v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// checkVectors checks the vectors of the wire format (tests/data/wire) in a file.
func checkVectors(path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSuffix(string(content), "\n"), "\n")
	columns := strings.Split(lines[0], "\t")
	numWrong := 0
	for _, line := range lines[1:] {
		vector := map[string]string{}
		for index, cell := range strings.Split(line, "\t") {
			vector[columns[index]] = cell
		}
		for _, fault := range faults(vector) {
			log.Printf("%s: %s", vector["name"], fault)
			numWrong++
		}
	}
	fmt.Println(len(lines)-1, "vectors")
	if numWrong > 0 {
		return fmt.Errorf("%d faults", numWrong)
	}
	return nil
}

// faults returns what of a vector is wrong.
func faults(vector map[string]string) (found []string) {
	wanted := must(hex.DecodeString(vector["bytes"]))
	kind := must(protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(vector["message"])))
	decoded, read := kind.New().Interface(), kind.New().Interface()
	if err := proto.Unmarshal(wanted, decoded); err != nil {
		return []string{err.Error()}
	}
	if err := protojson.Unmarshal([]byte(vector["values"]), read); err != nil || !proto.Equal(decoded, read) {
		found = append(found, fmt.Sprint("the values differ: ", err))
	}
	if string(must(proto.MarshalOptions{Deterministic: true}.Marshal(decoded))) != string(wanted) {
		found = append(found, "the encoded message has other bytes")
	}
	if decodedTensor, isTensor := decoded.(*pb.Tensor); isTensor {
		if strings.Join(texts(decodedTensor), ",") != vector["elements"] {
			found = append(found, "the elements differ")
		}
		if string(again(decodedTensor.Dtype, vector["elements"]).Data) != string(decodedTensor.Data) {
			found = append(found, "a tensor of the elements differs")
		}
	}
	digest := sha256.Sum256(append([]byte(vector["kind"]+"\x00"), wanted...))
	if vector["hash"] != "-" && hex.EncodeToString(digest[:]) != vector["hash"] {
		found = append(found, "the hash differs")
	}
	return found
}

// again returns a tensor of elements that texts returned, separated by commas.
func again(dtype pb.DataType, elements string) *pb.Tensor {
	parts := strings.Split(elements, ",")
	if elements == "" {
		parts = nil
	}
	switch dtype {
	case pb.DataType_DATA_TYPE_INT64:
		return tensor(dtype, parsed(parts, func(part string) int64 { return must(strconv.ParseInt(part, 10, 64)) }))
	case pb.DataType_DATA_TYPE_INT32:
		return tensor(dtype, parsed(parts, func(part string) int32 { return int32(must(strconv.ParseInt(part, 10, 32))) }))
	default:
		return tensor(dtype, parsed(parts, func(part string) float32 {
			return math.Float32frombits(uint32(must(strconv.ParseUint(part, 16, 32))))
		}))
	}
}

func parsed[Number any](parts []string, parse func(string) Number) []Number {
	found := make([]Number, len(parts))
	for index, part := range parts {
		found[index] = parse(part)
	}
	return found
}
