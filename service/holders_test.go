// SPDX-License-Identifier: Apache-2.0

package service

import (
	"net"
	"os"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
)

// An adoption keeps no process without a fitting socket, and a bounded number of others.
func TestHoldersAreBounded(t *testing.T) {
	nstest.NeedRoot(t)
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	self, err := pidfd.Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	fds, err := self.Sockets()
	if err != nil {
		t.Fatal(err)
	}
	var own uint32
	for inode := range fds {
		own = inode
	}
	for name, k := range map[string]struct {
		socks [][]sockdiag.Socket
		most  int
	}{
		"none fits": {nil, 1},
		"all fit":   {[][]sockdiag.Socket{{{Inode: own}}}, maxOwners},
	} {
		pids := make([]int, 2*maxOwners)
		for i := range pids {
			pids[i] = os.Getpid() // as good as that many processes
		}
		a := &Adoption{}
		owners, err := a.open(pids, k.socks)
		if err != nil || len(a.procs) != k.most || len(owners) == 0 {
			t.Errorf("%s: %d processes are kept, want %d; %d to choose from, %v", name, len(a.procs), k.most, len(owners), err)
		}
		if !a.Alive() {
			t.Errorf("%s: this process has exited", name)
		}
		a.Close()
	}
}
