// SPDX-License-Identifier: Apache-2.0

package handoffpair

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// connection is a connection of the client.
type connection struct {
	net.Conn
	host byte // host of the first answer
	over bool
}

type verdict int

const (
	goesOn verdict = iota
	wasReset
	wasLost
	isWrong
)

// patience is the longest silence of a connection, longer than the pauses of TCP's retransmissions.
const patience = 30 * time.Second

// ask requests the host's number.
func (c *connection) ask() verdict {
	b := [1]byte{'?'}
	_ = c.SetDeadline(time.Now().Add(patience)) // an error appears in the next call
	_, err := c.Write(b[:])
	if err == nil {
		_, err = io.ReadFull(c, b[:])
	}
	switch {
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE), errors.Is(err, io.EOF):
		c.over = true
		return wasReset
	case err != nil:
		c.over = true
		return wasLost
	case c.host == 0:
		c.host = b[0]
	case c.host != b[0]:
		c.over = true
		return isWrong
	}
	return goesOn
}

// opening is the number of connections opened in parallel.
const opening = 64

func (p *pair) open(ctx context.Context, n int) error {
	p.conns = make([]*connection, n)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	places := make(chan int)
	for range opening {
		wg.Go(func() {
			for i := range places {
				c := &connection{}
				err := p.client.Do(func() (err error) {
					c.Conn, err = net.DialTimeout("tcp", service.String(), patience)
					return err
				})
				mu.Lock()
				p.conns[i] = c
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	for i := range n {
		places <- i
	}
	close(places)
	wg.Wait()
	p.env.OnClose(func() {
		for _, c := range p.conns {
			if c.Conn != nil {
				c.Close()
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("open connections: %w", err)
	}
	return ctx.Err()
}

const hostArg = "__handoff-pair-host"

// Play runs a host if this process is one; else it returns. The host answers each request with its number.
// main calls Play first.
func Play() {
	if len(os.Args) != 3 || os.Args[1] != hostArg {
		return
	}
	l, err := net.Listen("tcp", service.String())
	if err != nil {
		fmt.Fprintln(os.Stderr, "host:", err)
		os.Exit(1)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, "host:", err)
			os.Exit(1)
		}
		go answer(c, os.Args[2][0])
	}
}

func answer(c net.Conn, number byte) {
	defer c.Close()
	b := make([]byte, 64)
	for {
		n, err := c.Read(b)
		if err != nil {
			return
		}
		for i := range n {
			b[i] = number
		}
		if _, err := c.Write(b[:n]); err != nil {
			return
		}
	}
}
