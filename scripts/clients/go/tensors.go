package main

import (
	"encoding/binary"
	"fmt"
	"strings"

	pb "example.com/train/gen/tinkerpool/v1"
)

// tensor returns numbers as little-endian bytes with type and shape.
func tensor[Number int32 | int64 | float32](dtype pb.DataType, values []Number) *pb.Tensor {
	var data strings.Builder
	must(0, binary.Write(&data, binary.LittleEndian, values))
	return &pb.Tensor{Data: []byte(data.String()), Dtype: dtype, Shape: []int64{int64(len(values))}}
}

// texts returns the elements of a tensor: integers in decimal, floats as their bits in hexadecimal.
func texts(tensor *pb.Tensor) (found []string) {
	for data := tensor.Data; len(data) > 0; {
		switch tensor.Dtype {
		case pb.DataType_DATA_TYPE_INT64:
			found = append(found, fmt.Sprint(int64(binary.LittleEndian.Uint64(data))))
			data = data[8:]
		case pb.DataType_DATA_TYPE_INT32:
			found = append(found, fmt.Sprint(int32(binary.LittleEndian.Uint32(data))))
			data = data[4:]
		default:
			found = append(found, fmt.Sprintf("%08x", binary.LittleEndian.Uint32(data)))
			data = data[4:]
		}
	}
	return found
}
