// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"fmt"
	"strconv"

	"github.com/weir-project/weir/clients/go/handoff"
)

// A server counts the bytes of each session. The count is the session's state. After a restart or a
// kill the next process continues with it, and the peer keeps its connection.
func ExampleListen() {
	l, err := handoff.Listen(context.Background(), "tcp", "127.0.0.1:0", handoff.Options{Service: "count", Name: "0"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer l.Close()
	for {
		s, err := l.AcceptSession() // a new connection, or one of the predecessor
		if err != nil {
			return // ErrReplaced: a newer process has everything
		}
		go count(s)
	}
}

func count(s *handoff.Session) {
	n, _ := strconv.Atoi(string(s.State())) // no state: a new session
	buf := make([]byte, 4096)
	for {
		read, err := s.Read(buf)
		if err != nil {
			return // ErrMoved: another process has the session now
		}
		n += read
		fmt.Fprintln(s, n)
		if err := s.Commit([]byte(strconv.Itoa(n))); err != nil {
			return
		}
	}
}

// A resolver keeps its UDP socket over a restart. The next process of this name continues with it,
// and no query is lost.
func ExampleJoin() {
	ctx := context.Background()
	m, err := handoff.Join(ctx, handoff.Options{Service: "dns", Name: "0"})
	if err != nil {
		fmt.Println(err) // no keeper answers: weir serve, or weir handoff keep, runs one
		return
	}
	defer m.Close()
	queries, err := m.ListenPacket(ctx, "udp", "127.0.0.1:5353")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer queries.Close()
	if err := m.Ready(); err != nil { // from now on this process serves
		fmt.Println(err)
		return
	}
	buf := make([]byte, 1500)
	for {
		n, from, err := queries.ReadFromUDPAddrPort(buf)
		if err != nil {
			return // handoff.ErrReplaced: a newer process has the socket
		}
		if _, err := queries.WriteToUDPAddrPort(buf[:n], from); err != nil {
			fmt.Println(err)
		}
	}
}
