// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func TestLoads(t *testing.T) {
	nstest.NeedRoot(t)
	if err := kernel.Require(liveness.Needs(liveness.Config{Tick: time.Millisecond})); err != nil {
		t.Skip("need: kernel", err)
	}
	var o bpf.BfdObjects
	err := bpf.LoadBfdObjects(&o, nil)
	if v, ok := errors.AsType[*ebpf.VerifierError](err); ok {
		t.Fatalf("%+.20v", v)
	}
	if err != nil {
		t.Fatal(err)
	}
	o.Close()
}
