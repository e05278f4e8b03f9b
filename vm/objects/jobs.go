// SPDX-License-Identifier: Apache-2.0

package objects

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	client "github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/feature/filter"
	lookup "github.com/weir-project/weir/feature/filter/bpf"
	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/guard"
	guardbpf "github.com/weir-project/weir/feature/guard/bpf"
	batchbpf "github.com/weir-project/weir/feature/guard/guardtest/bpf"
	"github.com/weir-project/weir/feature/handoff/lb"
	lbbpf "github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	quarantinebpf "github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	bfdbpf "github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/feature/reroute/liveness"
	livenessbpf "github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/feature/reroute/protect"
	protectbpf "github.com/weir-project/weir/feature/reroute/protect/bpf"
	steerbpf "github.com/weir-project/weir/feature/steer/bpf"
	steerengine "github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/kernel/probe"
	tablebpf "github.com/weir-project/weir/table/tabletest/bpf"
)

// Jobs returns all uses of all objects.
func Jobs() (out []Job) {
	for _, part := range [][]Job{steerJobs(), guardJobs(), filterJobs(), handoffJobs(), rerouteJobs(), testJobs()} {
		out = append(out, part...)
	}
	return out
}

const steerDir = "feature/steer/bpf/"

func steerJobs() []Job {
	byLookup, byReuseport := required(spec.EngineNeeds(spec.EngineSkLookup)...), required(spec.EngineNeeds(spec.EngineReuseport)...)
	return []Job{
		{Name: "steer sk_lookup", Object: steerDir + "steer", Spec: steerbpf.LoadSteer, Programs: []string{steerbpf.SteerProgSteerLookup}, Needs: byLookup},
		{Name: "steer bindings", Object: steerDir + "steer", Spec: steerbpf.LoadSteer, Programs: []string{steerbpf.SteerProgSteerDispatch}, Needs: byLookup},
		{Name: "steer exit", Object: steerDir + "steer", Spec: steerbpf.LoadSteer, Programs: []string{steerbpf.SteerProgSteerExit}, Needs: []kernel.Need{probe.ExitTracepoint}},
		{Name: "steer sk_reuseport", Object: steerDir + "reuse", Spec: steerbpf.LoadReuse, Programs: []string{steerbpf.ReuseProgSteerReuse}, Needs: byReuseport},
		{Name: "steer sk_reuseport exit", Object: steerDir + "reuse", Spec: steerbpf.LoadReuse, Programs: []string{steerbpf.ReuseProgSteerExit}, Needs: []kernel.Need{probe.ExitTracepoint}},
		{Name: "steer migrate", Object: steerDir + "reuse", Spec: steerbpf.LoadReuse, Programs: []string{steerbpf.ReuseProgSteerMigrate}, Needs: []kernel.Need{hook.QueueMigration}},
		{Name: "steer groups", Object: steerDir + "groups", Spec: steerbpf.LoadGroups,
			Programs: []string{steerbpf.GroupsProgSteerUdpGroups, steerbpf.GroupsProgSteerTcpGroups}, Needs: []kernel.Need{steerengine.GroupPrograms}},
		{Name: "steer watch", Object: steerDir + "watch", Spec: steerbpf.LoadWatch,
			Programs: []string{steerbpf.WatchProgWatchListen, steerbpf.WatchProgWatchBind4, steerbpf.WatchProgWatchBind6},
			Needs:    []kernel.Need{probe.SocketTracepoint, probe.PostBind, probe.RingBuffer}},
		{Name: "steer share_port", Object: steerDir + "bind", Spec: steerbpf.LoadBind,
			Programs: []string{steerbpf.BindProgBindShare4, steerbpf.BindProgBindShare6}, Needs: []kernel.Need{probe.BindShare}},
		{Name: "steer copy", Object: steerDir + "copy", Spec: steerbpf.LoadCopy, Programs: []string{steerbpf.CopyProgCopyIngress}, Needs: []kernel.Need{probe.TCFilter}},
		{Name: "steer templates", Object: steerDir + "templates", Spec: steerbpf.LoadTemplates, Programs: []string{steerbpf.TemplatesProgTemplatesFilter}, Needs: []kernel.Need{probe.PacketFilter}},
		{Name: "steer inject", Object: steerDir + "inject", Spec: steerbpf.LoadInject, Programs: []string{steerbpf.InjectProgInject}, Needs: []kernel.Need{probe.PacketFilter}},
	}
}

const guardObject = "feature/guard/bpf/guard"

func guardJobs() []Job {
	needs := func(s guard.Service) []kernel.Need {
		return required(guard.Feature{}.Needs(guard.Config{Services: []guard.Service{s}})...)
	}
	atSockets, atInterfaces := needs(guard.Service{}), needs(guard.Service{Options: guard.Options{Interfaces: []string{"eth0"}}})
	swap := needs(guard.Service{})[:1]
	return []Job{
		{Name: "guard own socket", Object: guardObject, Spec: guardbpf.LoadGuard, Programs: []string{guardbpf.GuardProgGuardSocket}, Needs: swap},
		{Name: "guard sockets", Object: guardObject, Spec: guardbpf.LoadGuard, Programs: []string{guardbpf.GuardProgGuardCgroup}, Needs: atSockets},
		{Name: "guard sockets by namespace", Object: guardObject, Spec: guardOfNamespace, Programs: []string{guardbpf.GuardProgGuardCgroup}, Needs: append(atSockets[:len(atSockets):len(atSockets)], probe.PacketNetnsCookie)},
		{Name: "guard interfaces", Object: guardObject, Spec: guardbpf.LoadGuard, Programs: []string{guardbpf.GuardProgGuardXdp}, Needs: atInterfaces},
		{Name: "guard client", Object: "clients/go/guard/socket", Open: openClient, Needs: swap},
	}
}

// guardOfNamespace returns the guard's object with the calls for one of several namespaces.
func guardOfNamespace() (*ebpf.CollectionSpec, error) {
	s, err := guardbpf.LoadGuard()
	if err != nil {
		return nil, err
	}
	return s, s.Variables[guardbpf.GuardVarGuardNetns].Set(uint64(1))
}

func openClient() (func(), error) {
	g, err := client.New(1000)
	if err != nil {
		return nil, err
	}
	return func() { g.Close() }, nil
}

// filterJobs compile one filter for each hook. It has a list in a table, a rate and a pattern, so it uses all kinds of
// instructions.
func filterJobs() (out []Job) {
	for _, h := range []struct {
		hook    filter.Hook
		options compile.Options
	}{
		{filter.HookXDP, compile.Options{Hook: compile.XDP}},
		{filter.HookTCX, compile.Options{Hook: compile.TC}},
		{filter.HookClsact, compile.Options{Hook: compile.TC, Start: compile.IPHeader}},
		{filter.HookNetfilter, compile.Options{Hook: compile.Netfilter}},
		{filter.HookNFT, compile.Options{Hook: compile.Socket, Start: compile.IPHeader}},
		{filter.HookSocket, compile.Options{Hook: compile.Socket, Start: compile.Transport}},
	} {
		needs := required(filter.Feature{}.Needs(filter.Config{Filters: []filter.Filter{{Hook: h.hook}}})...)
		if h.hook == filter.HookTCX {
			needs = append(needs, kernel.TCXLink)
		}
		out = append(out, Job{Name: fmt.Sprintf("filter %s", h.hook), Programs: []string{compile.ProgramName}, Needs: needs,
			Spec: func() (*ebpf.CollectionSpec, error) { return compiled(h.options) }})
	}
	return append(out, Job{Name: "filter lists", Object: "feature/filter/bpf/lookup", Spec: lookup.LoadLookup, Programs: []string{lookup.LookupProgListEntry}})
}

func compiled(o compile.Options) (*ebpf.CollectionSpec, error) {
	o.Lists = map[string]compile.List{"few": {Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}, "many": {Segments: 1}}
	var rules []compile.Rule
	for _, text := range []string{"net.src in $few", "ip.src in $many or ipv6.src in $many", `payload matches "^a[bc]+d$"`, "rate(net.src) > 100/s", "udp.dstport == 53 and len(payload) > 512"} {
		rules = append(rules, compile.Rule{Match: expr.MustParse(text), Action: compile.Drop})
	}
	p, err := compile.Compile(rules, o)
	if err != nil {
		return nil, err
	}
	return p.Spec, nil
}

func handoffJobs() []Job {
	return []Job{
		{Name: "lb", Object: "feature/handoff/lb/bpf/lb", Spec: lbbpf.LoadLB, Needs: required(lb.Needs...),
			Programs: []string{lbbpf.LBProgLbIn, lbbpf.LBProgLbAgain, lbbpf.LBProgLbOwn, lbbpf.LBProgLbChange}},
		{Name: "backend quarantine", Object: "feature/handoff/quarantine/bpf/quarantine", Spec: quarantinebpf.LoadQuarantine, Needs: required(quarantine.Needs...),
			Programs: []string{quarantinebpf.QuarantineProgQuarantineIn, quarantinebpf.QuarantineProgQuarantineOut, quarantinebpf.QuarantineProgQuarantineAgain}},
	}
}

func rerouteJobs() []Job {
	protection := required(protect.Needs(protect.Config{Paths: make([]protect.Path, 1)})...)
	probes := required(liveness.Needs(liveness.Config{Tick: time.Millisecond})...)
	const object = "feature/reroute/liveness/bpf/liveness"
	return []Job{
		{Name: "reroute out", Object: "feature/reroute/protect/bpf/protect", Spec: protectbpf.LoadProtect, Needs: protection, Programs: []string{protectbpf.ProtectProgRerouteEgress}},
		{Name: "reroute in", Object: "feature/reroute/protect/bpf/protect", Spec: protectbpf.LoadProtect, Needs: protection, Programs: []string{protectbpf.ProtectProgRerouteIngress}},
		{Name: "reroute bfd", Object: "feature/reroute/bfd/engine/bpf/bfd", Spec: bfdbpf.LoadBfd, Needs: required(engine.Needs()...),
			Programs: []string{bfdbpf.BfdProgBfdTick, bfdbpf.BfdProgBfdReceive, bfdbpf.BfdProgBfdLeave}},
		{Name: "reroute liveness", Object: object, Spec: livenessbpf.LoadLiveness, Needs: probes,
			Programs: []string{livenessbpf.LivenessProgLivenessTick, livenessbpf.LivenessProgLivenessReturn, livenessbpf.LivenessProgLivenessLeave}},
		{Name: "reroute liveness answers", Object: object, Spec: livenessbpf.LoadLiveness, Needs: append(probes[:len(probes):len(probes)], probe.SegmentFunction), Programs: []string{livenessbpf.LivenessProgLivenessEnd}},
		{Name: "reroute liveness benchmark", Object: object, Spec: livenessbpf.LoadLiveness, Needs: probes, Programs: []string{livenessbpf.LivenessProgLivenessEndRun}},
	}
}

// testJobs are objects for tests of libraries.
func testJobs() []Job {
	swap := required(guard.Feature{}.Needs(guard.Config{Services: []guard.Service{{}}})...)[:1]
	return []Job{
		{Name: "table", Object: "table/tabletest/bpf/probe", Spec: tablebpf.LoadProbe, Programs: []string{tablebpf.ProbeProgProbeLookup}, Needs: []kernel.Need{kernel.XDPProgram}},
		{Name: "table bindings", Object: "table/tabletest/bpf/probe", Spec: tablebpf.LoadProbe, Programs: []string{tablebpf.ProbeProgProbeBindings}, Needs: []kernel.Need{kernel.XDPProgram}},
		{Name: "guard simulation", Object: "feature/guard/guardtest/bpf/batch", Spec: batchbpf.LoadBatch, Needs: append(swap[:1:1], probe.LoopHelper),
			Programs: []string{batchbpf.BatchProgGuardBatch, batchbpf.BatchProgGuardSocket, batchbpf.BatchProgGuardCgroup, batchbpf.BatchProgGuardXdp}},
	}
}
