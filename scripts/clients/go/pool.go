package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net/url"
	"time"

	pb "example.com/train/gen/tinkerpool/v1"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

const callTimeout, longestPause = 30 * time.Second, 2 * time.Second

// key puts an API key into the metadata of every call. It may travel in plaintext: to a pool on this machine.
type key string

func (k key) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(k)}, nil
}

func (k key) RequireTransportSecurity() bool { return false }

// connect returns a connection to http://host:port, or with TLS to https://host:port. trusted is a PEM file; without
// one the authorities of this machine are trusted.
func connect(base, apiKey, trusted string) (*grpc.ClientConn, error) {
	address, err := url.Parse(base)
	if err != nil {
		return nil, err
	}
	transport := grpc.WithInsecure()
	if address.Scheme == "https" {
		tls := credentials.NewClientTLSFromCert(nil, "")
		if trusted != "" {
			if tls, err = credentials.NewClientTLSFromFile(trusted, ""); err != nil {
				return nil, err
			}
		}
		transport = grpc.WithTransportCredentials(tls)
	}
	pauses := backoff.DefaultConfig
	pauses.MaxDelay = longestPause // otherwise up to two minutes between two attempts to reach a pool that restarts
	return grpc.Dial(address.Host, transport,
		grpc.WithPerRPCCredentials(key(apiKey)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: pauses, MinConnectTimeout: callTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
}

// call makes a call until it succeeds. The same request again is safe: it has a seq or a request_id, or changes nothing.
func call[Request, Response any](
	name string, method func(context.Context, *Request, ...grpc.CallOption) (*Response, error), request *Request,
) (*Response, error) {
	return repeated(name, func() (*Response, error) {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		return method(ctx, request)
	})
}

// repeated attempts until it succeeds: after the delay that a refusal tells, or growing pauses without a connection.
func repeated[Result any](name string, attempt func() (Result, error)) (Result, error) {
	pause := 200 * time.Millisecond
	for {
		result, err := attempt()
		info, delay := details(err)
		if delay == nil {
			if info.Reason != "" || !lost(err) {
				return result, err
			}
			delay = &pause
		}
		reason := info.Reason
		if reason == "" {
			reason = codeName(status.Code(err))
		}
		wait := time.Duration(float64(*delay) * (1 + rand.Float64()/4))
		log.Printf("%s: %s; again in %.1f s", name, reason, wait.Seconds())
		time.Sleep(wait)
		if pause *= 2; pause > longestPause {
			pause = longestPause
		}
	}
}

// lost returns whether an error without a reason of the pool's is one of the network, or of a stop of the pool.
func lost(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Internal:
		return true
	}
	return false
}

// details returns why a call was refused, and the delay after which it may succeed; nil: it will not.
func details(err error) (*errdetails.ErrorInfo, *time.Duration) {
	info, delay := &errdetails.ErrorInfo{}, (*time.Duration)(nil)
	for _, detail := range status.Convert(err).Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			info = found
		case *errdetails.RetryInfo:
			duration := found.RetryDelay.AsDuration()
			delay = &duration
		}
	}
	return info, delay
}

// codeName returns the name of a code as the contract writes it: INVALID_ARGUMENT.
func codeName(of codes.Code) string { return code.Code_name[int32(of)] }

// receive gives each message of a stream to take, up to the end of the stream.
func receive[Response any](stream interface{ Recv() (*Response, error) }, err error, take func(*Response) error) error {
	for err == nil {
		var response *Response
		if response, err = stream.Recv(); err == nil {
			err = take(response)
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// finished waits for operations over a stream. After a broken one it asks for those that are missing.
func finished(operations pb.OperationServiceClient, names []string) (map[string]*pb.Operation, error) {
	found := map[string]*pb.Operation{}
	return repeated("WaitOperations", func() (map[string]*pb.Operation, error) {
		request := &pb.WaitOperationsRequest{}
		for _, name := range names {
			if found[name] == nil {
				request.Names = append(request.Names, name)
			}
		}
		stream, err := operations.WaitOperations(context.Background(), request)
		return found, receive[pb.WaitOperationsResponse](stream, err, func(response *pb.WaitOperationsResponse) error {
			operation := response.Operation
			if operation.State == pb.OperationState_OPERATION_STATE_FAILED {
				return fmt.Errorf("%s: %s: %s", operation.Name, operation.Error.Reason, operation.Error.Message)
			}
			found[operation.Name] = operation
			return nil
		})
	})
}
