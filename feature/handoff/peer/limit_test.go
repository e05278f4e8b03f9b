// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"net"
	"testing"

	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
)

// heads connects to an accepting agent, sends some complete frames and the head of one more, and
// closes. It returns the agent's error at that frame.
func heads(t *testing.T, ca *peertest.Authority, sessions bool, whole []byte, kind byte, length uint32) error {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	config := ca.TLS("host-a").Config().Clone()
	config.ServerName = "lb"
	go func() {
		c, err := tls.Dial("tcp", l.Addr().String(), config)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		if _, err := c.Write(append(binary.BigEndian.AppendUint32(whole, length), kind)); err != nil {
			t.Error(err)
		}
		_, _ = c.Read(make([]byte, 1<<10)) // its hello
		_ = c.CloseWrite()
		_, _ = c.Read(make([]byte, 1<<10))
	}()
	raw, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c, err := peer.Accept(t.Context(), raw, ca.TLS("lb"), peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb"})
	if err != nil {
		return err
	}
	defer c.Close()
	if sessions {
		c.TakeSessions()
	}
	_, err = c.Receive()
	return err
}

// TestFrameLimits checks that an overlong frame is rejected by its head, before its body is read.
func TestFrameLimits(t *testing.T) {
	ca := peertest.NewAuthority(t)
	hello := append([]byte{0, 0, 0, 20, 1, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 9, 6}, "host-a"...)
	for _, c := range []struct {
		name     string
		sessions bool
		whole    []byte
		kind     byte
		body     uint32
		refused  bool
	}{
		{"hello", false, nil, 1, 268, false},
		{"long hello", false, nil, 1, 269, true},
		{"hello of 127 MiB", false, nil, 1, 127 << 20, true},
		{"move before the hello", false, nil, 2, 44, true},
		{"move", false, hello, 2, 44, false},
		{"session", false, hello, 2, 45, true},
		{"session where they move", true, hello, 2, 127 << 20, false},
		{"huge session", true, hello, 2, 128 << 20, true},
		{"registration", true, hello, 3, 64 << 10, false},
		{"long registration", true, hello, 3, 64<<10 + 1, true},
		{"peers", true, hello, 4, 1 << 20, false},
		{"long peers", true, hello, 4, 1<<20 + 1, true},
		{"ping", true, hello, 5, 1, true},
		{"flows", true, hello, 7, 1 << 20, false},
		{"long flows", true, hello, 7, 1<<20 + 1, true},
		{"load", true, hello, 9, 9, true},
		{"unknown", true, hello, 8, 1, true},
		{"second hello", true, hello, 1, 19, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := heads(t, ca, c.sessions, c.whole, c.kind, c.body+1)
			if err == nil || errors.Is(err, peer.ErrFormat) != c.refused {
				t.Errorf("%v; refused by its head: want %v", err, c.refused)
			}
		})
	}
}
