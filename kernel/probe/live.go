// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// SegmentFunction is a program as the function of an SRv6 segment.
var SegmentFunction = kernel.Need{Name: "SRv6 functions in BPF (End.BPF)", Since: "4.18", For: "answering probes of links",
	Remedy: "the kernel must be built with CONFIG_IPV6_SEG6_BPF; probe a peer with plain SRv6 routing with mode: echo",
	Probe: func() error {
		kernel.LiftMemlock()
		return kernel.ExplainProbe(features.HaveProgramHelper(ebpf.LWTSeg6Local, asm.FnLwtSeg6StoreBytes))
	}}

// LoopHelper repeats a part of a program a variable number of times.
var LoopHelper = kernel.Need{Name: "bpf_loop in tc programs", Since: "5.17", For: "sending the probes of hundreds of sessions in one tick",
	Remedy: "use a newer kernel", Probe: func() error {
		kernel.LiftMemlock()
		return kernel.ExplainProbe(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnLoop))
	}}

// TokenBucket is the queue discipline whose timer clocks probes. A kernel loads its module at first use.
var TokenBucket = kernel.Need{Name: "token bucket queues (sch_tbf)", Since: "2.6", For: "the clock of probes, which no process can delay",
	Remedy: "the kernel must have CONFIG_NET_SCH_TBF: modprobe sch_tbf", Probe: func() error { return probeModule("sch_tbf", "tbf_init") }}

// probeModule returns nil if the kernel has a module built in or loadable.
func probeModule(module, symbol string) error {
	symbols, err := os.ReadFile("/proc/kallsyms")
	if err == nil && strings.Contains(string(symbols), " "+symbol) {
		return nil
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	dir := "/lib/modules/" + unix.ByteSliceToString(u.Release[:])
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		text, err := os.ReadFile(dir + "/" + list)
		if err == nil && strings.Contains(string(text), "/"+module+".ko") {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("cannot determine whether %s is available: %w", module, err)
	}
	return errors.New("neither built in nor a module")
}
