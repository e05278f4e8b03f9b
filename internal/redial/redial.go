// SPDX-License-Identifier: Apache-2.0

// Package redial connects to Unix sockets with a possibly full listen queue.
package redial

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"
)

// A listen queue empties within milliseconds, unless the server stalls.
const (
	every   = 2 * time.Millisecond
	longest = 5 * time.Second
)

// Dial connects to a Unix socket. Any user with access can keep its listen queue full for a while,
// and connect(2) then fails with EAGAIN. Dial retries for 5 s, or until ctx is done.
func Dial(ctx context.Context, network, path string) (net.Conn, error) {
	for began := time.Now(); ; {
		c, err := net.Dial(network, path) // does not wait
		if !errors.Is(err, syscall.EAGAIN) || time.Since(began) > longest {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err())
		case <-time.After(every):
		}
	}
}
