// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/kernel"
)

// tell logs liveness' verdicts and their effect on paths. With shadow paths in the first weeks, it shows the
// rerouting to expect. Verdicts from before the start are logged late, with their time.
func tell(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	liveness.AllEvents(ctx, r, func(e liveness.SessionEvent) {
		say, msg := log.Info, "link is up"
		switch {
		case e.Phase == liveness.Down && e.Ended:
			say, msg = log.Warn, "peer ended its session: the link was found down before and stays down until probes are answered"
		case e.Phase == liveness.Down:
			say, msg = log.Warn, "link is down"
		case e.Phase == liveness.Init:
			msg = "peer ended its session: the link is used, unprobed"
		}
		args := []any{"session", e.Session.Name, "interface", e.Session.Device}
		if e.Netns != "" {
			args = append(args, "netns", e.Netns)
		}
		if e.Phase == liveness.Down && !e.Ended {
			args = append(args, "err", reason(e))
		}
		if at := e.At(); time.Since(at) > late {
			args = append(args, "at", at.Format(time.RFC3339Nano))
		}
		if paths := affected(ctx, r, e); paths != "" {
			args = append(args, "paths", paths)
		}
		say(msg, args...)
	})
	return nil
}

// late is the age from which a verdict's own time is logged.
const late = time.Second

func reason(e liveness.SessionEvent) string {
	if e.ByPeer {
		return "the peer's probes are missing"
	}
	return "answers to probes are missing"
}

// affected describes the effect of a session's change on each path of its link; "" if there is none.
func affected(ctx context.Context, r *kernel.Root, e liveness.SessionEvent) string {
	st, err := protect.ReadState(ctx, r)
	if err != nil || e.Phase == liveness.Init {
		return ""
	}
	var out []string
	for _, p := range st.Paths {
		if p.Device != e.Session.Device || p.Netns != e.Netns {
			continue
		}
		out = append(out, p.Name+": "+effect(p, e))
	}
	return strings.Join(out, ", ")
}

func effect(p protect.PathState, e liveness.SessionEvent) string {
	switch {
	case e.Session.Observe:
		return "unchanged, because the session only observes"
	case e.Phase == liveness.Down && len(p.Dropped) > 0:
		return "dropped, no way left"
	case len(p.Dropped) > 0:
		return "still dropped, no way left"
	case e.Phase == liveness.Down && p.Shadow:
		return "would be rerouted (shadow)"
	case e.Phase == liveness.Down:
		return "rerouted"
	case p.Down:
		return "still rerouted"
	}
	return "used"
}
