// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
)

// TestReplacedWhileAccepting checks a connection being accepted when the listener stops. It is
// handed over with the rest. Accept reports the end only afterwards, because the process may exit
// then.
func TestReplacedWhileAccepting(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	old := w.join("0")
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	peer := dial(t, other.Addr())
	c, err := other.Accept()
	if err != nil {
		t.Fatal(err)
	}
	accepted := old.Accepting()
	ended := make(chan error, 1)
	go func() {
		_, err := old.AcceptSession()
		ended <- err
	}()
	next := w.join("0")
	<-old.Replaced()
	select {
	case err := <-ended:
		t.Fatalf("ended before the connection is kept: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	accepted(c.(*net.TCPConn))
	if err := <-ended; !errors.Is(err, handoff.ErrReplaced) {
		t.Errorf("%v, want ErrReplaced", err)
	}
	stuck := time.AfterFunc(patience, func() { next.Close() })
	defer stuck.Stop()
	s, err := next.AcceptSession()
	if err != nil || s.RemoteAddr().String() != peer.LocalAddr().String() {
		t.Errorf("%v, %v", s, err)
	}
}
