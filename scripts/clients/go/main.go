// Trains an adapter, samples from it and exports it. Prints results; floats also as the bits that the contract carries.
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"log"
	"math"
	"os"
	"strings"

	pb "example.com/train/gen/tinkerpool/v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const numSteps, numEarly = 10, 6

var (
	tokens  = []int32{459, 342, 343, 386, 505, 351, 77, 260}
	weights = []float32{1, 0.5, 0.25, 1, 0.5, 0.25, 1}
)

func main() {
	log.SetFlags(0)
	if len(os.Args) > 1 {
		must(0, checkVectors(os.Args[1]))
		return
	}
	conn := must(connect(os.Getenv("TINKERPOOL_BASE_URL"), os.Getenv("TINKERPOOL_API_KEY"), os.Getenv("TINKERPOOL_CERTIFICATE")))
	defer conn.Close()
	operations, training := pb.NewOperationServiceClient(conn), pb.NewTrainingServiceClient(conn)
	sessions, adapters := pb.NewSessionServiceClient(conn), pb.NewAdapterServiceClient(conn)
	checkpoints, sampling := pb.NewCheckpointServiceClient(conn), pb.NewSamplingServiceClient(conn)

	baseModel := must(call("GetCapabilities", sessions.GetCapabilities, &pb.GetCapabilitiesRequest{})).BaseModels[0].Name
	fmt.Println("model", baseModel)
	session := must(call("CreateSession", sessions.CreateSession, &pb.CreateSessionRequest{RequestId: newID()})).Session
	newAdapter := &pb.CreateAdapterRequest{
		SessionId: session.SessionId, RequestId: newID(), BaseModel: baseModel, Rank: 3, Seed: proto.Int64(7),
	}
	if _, err := call("CreateAdapter", adapters.CreateAdapter, newAdapter); err != nil {
		info, _ := details(err)
		fmt.Println("refused", codeName(status.Code(err)), info.Reason, info.Domain)
	}
	newAdapter.Rank = 8
	adapter := must(call("CreateAdapter", adapters.CreateAdapter, newAdapter)).Adapter.AdapterId

	train(operations, training, adapter)

	state := must(call("SaveState", checkpoints.SaveState,
		&pb.SaveStateRequest{AdapterId: adapter, Seq: 2*numSteps + 1, Name: "state"})).Operation
	saving := must(call("SaveWeightsForSampler", checkpoints.SaveWeightsForSampler,
		&pb.SaveWeightsForSamplerRequest{AdapterId: adapter, Seq: 2*numSteps + 2, Name: "final"})).Operation
	saved := must(finished(operations, []string{state.Name, saving.Name}))
	path := saved[saving.Name].GetSaveWeightsForSampler().Path
	newSampler := &pb.CreateSamplerRequest{SessionId: session.SessionId, RequestId: newID(), ModelPath: path}
	sample(sampling, must(call("CreateSampler", sampling.CreateSampler, newSampler)).Sampler.SamplerId)

	archive := must(repeated("ExportCheckpoint", func() (archive []byte, err error) {
		stream, err := checkpoints.ExportCheckpoint(context.Background(), &pb.ExportCheckpointRequest{Path: path})
		err = receive[pb.ExportCheckpointResponse](stream, err, func(piece *pb.ExportCheckpointResponse) error {
			archive = append(archive, piece.Data...)
			return nil
		})
		return archive, err
	}))
	fmt.Printf("export %d bytes sha256 %x\n", len(archive), sha256.Sum256(archive))
	listing := &pb.ListCheckpointsRequest{AdapterId: adapter}
	for _, found := range must(call("ListCheckpoints", checkpoints.ListCheckpoints, listing)).Checkpoints {
		name := strings.TrimPrefix(found.Path, "tinker://"+adapter+"/")
		fmt.Println("checkpoint", name, "seq", found.Seq, "rank", found.Rank, "sha256", found.Sha256)
	}
	must(call("FinishSession", sessions.FinishSession, &pb.FinishSessionRequest{SessionId: session.SessionId}))
	fmt.Println("done")
}

// train takes the steps, all of them in flight at a time, and prints what they gave.
func train(operations pb.OperationServiceClient, training pb.TrainingServiceClient, adapter string) {
	datum := &pb.Datum{
		Tokens: tensor(pb.DataType_DATA_TYPE_INT32, tokens[:len(tokens)-1]),
		LossInputs: map[string]*pb.Tensor{
			"target_tokens": tensor(pb.DataType_DATA_TYPE_INT32, tokens[1:]),
			"weights":       tensor(pb.DataType_DATA_TYPE_FLOAT32, weights),
		},
	}
	send := func(step int64) []string {
		sent := must(call("TrainStep", training.TrainStep, &pb.TrainStepRequest{
			AdapterId:    adapter,
			Seq:          2*step - 1,
			Data:         []*pb.Datum{datum},
			LossFunction: pb.LossFunction_LOSS_FUNCTION_CROSS_ENTROPY,
			Adam:         &pb.AdamParams{LearningRate: proto.Float64(2e-3)},
		}))
		return []string{sent.ForwardBackward.Name, sent.OptimStep.Name}
	}

	// The pool takes steps in any order and runs them by seq: sent last first, none can finish before the first is sent.
	var early, late []string
	for step := int64(numSteps); step > numSteps-numEarly; step-- {
		early = append(early, send(step)...)
	}
	waiting := make(chan map[string]*pb.Operation)
	go func() { waiting <- must(finished(operations, early)) }()
	fmt.Println("sent", numEarly, "steps")
	for step := int64(numSteps - numEarly); step > 0; step-- {
		late = append(late, send(step)...)
	}
	results := <-waiting
	for name, operation := range must(finished(operations, late)) {
		results[name] = operation
	}
	if again := send(numSteps); again[0] != early[0] {
		log.Fatalf("the same seq again gave %s instead of %s", again[0], early[0])
	}
	for step := 1; step <= numSteps; step++ {
		forward := results[fmt.Sprintf("%s:%d", adapter, 2*step-1)].GetForwardBackward()
		norm := results[fmt.Sprintf("%s:%d", adapter, 2*step)].GetOptimStep().Metrics["grad_norm:last"]
		loss := forward.Metrics["loss:sum"]
		fmt.Printf("step %d loss %.4f %016x grad_norm %016x\n", step, loss, math.Float64bits(loss), math.Float64bits(norm))
		fmt.Printf("step %d logprobs %s\n", step, strings.Join(texts(forward.Logprobs[0]), " "))
	}
}

// sample samples with a stream, and prints the sequences.
func sample(sampling pb.SamplingServiceClient, sampler string) {
	request := &pb.StreamSampleRequest{Request: &pb.SampleRequest{
		SamplerId:  sampler,
		Seq:        1,
		Prompt:     tensor(pb.DataType_DATA_TYPE_INT32, tokens[:3]),
		NumSamples: 2,
		Params: &pb.SamplingParams{
			MaxTokens: 8, Temperature: proto.Float32(0.75), Seed: proto.Int64(11), Stop: &pb.StopCondition{},
		},
	}}
	var streamed map[int32][]string
	result := must(repeated("StreamSample", func() (result *pb.SampleResult, err error) {
		streamed = map[int32][]string{}
		stream, err := sampling.StreamSample(context.Background(), request)
		err = receive[pb.StreamSampleResponse](stream, err, func(event *pb.StreamSampleResponse) error {
			if token := event.GetToken(); token != nil {
				streamed[token.SequenceIndex] = append(streamed[token.SequenceIndex], fmt.Sprint(token.Token))
			}
			result = event.GetOperation().GetSample()
			return nil
		})
		return result, err
	}))
	for index, sequence := range result.Sequences {
		drawn := strings.Join(texts(sequence.Tokens), " ")
		if got := strings.Join(streamed[int32(index)], " "); got != drawn {
			log.Fatalf("%s was streamed, and %s is the result", got, drawn)
		}
		fmt.Printf("sample %d tokens %s\n", index, drawn)
		fmt.Printf("sample %d logprobs %s\n", index, strings.Join(texts(sequence.Logprobs), " "))
	}
}

func newID() string {
	id := make([]byte, 16)
	must(rand.Read(id))
	return fmt.Sprintf("%x", id)
}

func must[Value any](value Value, err error) Value {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
