// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"time"
)

// ErrAnswers says that another process answers at the address of a listener.
var ErrAnswers = errors.New("another process answers there")

// A killed process holds its sockets until the kernel has closed all of its descriptors. A
// successor may start before that.
const (
	takeOverEvery = 20 * time.Millisecond
	// TakeOver is how long a successor waits for the address of its predecessor.
	TakeOver = 3 * time.Second
)

// Again calls listen until the address is free: for TakeOver at most, or until ctx is done. It logs
// that it waits. Only EADDRINUSE and [ErrAnswers] are waited out. listen runs in the calling
// goroutine, whose thread may be in another network namespace.
func Again(ctx context.Context, log *slog.Logger, address string, listen func() (net.Listener, error)) (net.Listener, error) {
	began, told := time.Now(), false
	for {
		l, err := listen()
		waited := time.Since(began)
		switch {
		case err == nil && told:
			log.Info("address is free", "address", address, "waited", waited.Round(time.Millisecond))
			return l, nil
		case err == nil:
			return l, nil
		case waited > TakeOver || !errors.Is(err, syscall.EADDRINUSE) && !errors.Is(err, ErrAnswers):
			return nil, err
		case !told:
			told = true
			log.Warn("address is in use, waiting for the predecessor to end", "address", address, "timeout", TakeOver)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(takeOverEvery):
		}
	}
}

// TCP listens at an address in the network namespace of the calling thread, as [Again] does.
func TCP(ctx context.Context, log *slog.Logger, address string) (net.Listener, error) {
	return Again(ctx, log, address, func() (net.Listener, error) { return net.Listen("tcp", address) })
}
