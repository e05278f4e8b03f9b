// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// Any user can listen at bfdd's address before bfdd does. The client accepts nothing from them, neither at a TCP
// address of this host nor at a reachable Unix socket.
func TestImpostor(t *testing.T) {
	nstest.NeedRoot(t)
	for network, address := range map[string]string{"tcp": "127.0.0.1:0", "unix": fmt.Sprintf("@weir-dplane-%d", os.Getpid())} {
		t.Run(network, func(t *testing.T) {
			listening, accepted := make(chan net.Listener, 1), make(chan error, 1)
			nstest.AsUser(t, 65534, func() error {
				l, err := net.Listen(network, address)
				if err == nil {
					listening <- l
				}
				return err
			})
			l := <-listening
			defer l.Close()
			go func() {
				nstest.AsUser(t, 65534, func() error {
					_, err := l.Accept() // stays open
					accepted <- err
					return nil
				})
			}()
			log := &nstest.Log{}
			e := &recorder{sessions: map[uint32]Session{}, owners: map[uint32]Owner{}}
			c := New(network, l.Addr().String(), e, nil, slog.New(slog.NewTextHandler(log, nil)))
			e.client = c
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			if err := <-accepted; err != nil {
				t.Fatal(err)
			}
			nstest.Until(t, "the log tells", func() bool { return log.String() != "" })
			if text := log.String(); !strings.Contains(text, "another user answers there: user ") || !strings.Contains(text, "65534") || strings.Contains(text, "connected to bfdd") {
				t.Error(text)
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}
