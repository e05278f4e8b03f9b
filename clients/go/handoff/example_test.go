// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"fmt"
	"strconv"

	"github.com/weir-project/weir/clients/go/handoff"
)

// A server counts the bytes of each session. The count is the session's state: after a restart or a kill the next process
// goes on with it, and the peer keeps its connection.
func ExampleListen() {
	l, err := handoff.Listen(context.Background(), "tcp", "127.0.0.1:0", handoff.Options{Service: "count", Name: "0"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer l.Close()
	for {
		s, err := l.AcceptSession() // a new connection, or one of the process before
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
