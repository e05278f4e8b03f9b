// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"net/url"

	"github.com/weir-project/weir/feature/steer"
)

func (p pins) Templates(ctx context.Context, service string) (steer.TemplateState, error) {
	st, err := steer.ReadState(ctx, p.Root)
	if err != nil {
		return steer.TemplateState{}, err
	}
	s, err := st.Service(service)
	if err != nil {
		return steer.TemplateState{}, err
	}
	return s.Templates(p.Root)
}

func (r remote) Templates(ctx context.Context, service string) (t steer.TemplateState, err error) {
	return t, r.get(ctx, "/v1/steer/templates", url.Values{"service": {service}}, &t)
}
