/* SPDX-License-Identifier: MIT */
/*
 * From C++: which of several sentences does the model find likeliest? Each is
 * turned into ids and scored; the mean log-probability of its ids is printed.
 *   c++ likeliest.cpp $(pkg-config --cflags --libs libaprclient) -o likeliest
 */
#include <apr/client.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Session {
public:
	Session()
	{
		char err[256] = "";
		struct apr *c = nullptr;

		if (apr_connect(&c, nullptr, err, sizeof(err)))
			throw std::runtime_error(err);
		handle.reset(c);
	}

	std::vector<uint32_t> tokenize(const std::string &text)
	{
		char err[256] = "";
		uint32_t *ids = nullptr;
		size_t n = 0;

		if (apr_tokenize(handle.get(), 0, text.data(), text.size(), APR_SQE_ADD_BOS, &ids, &n, err, sizeof(err)))
			throw std::runtime_error(err);
		std::vector<uint32_t> out(ids, ids + n);
		std::free(ids);
		return out;
	}

	double mean_logprob(const std::vector<uint32_t> &ids)
	{
		char err[256] = "";
		double sum = 0;
		auto add = [](void *arg, const struct apr_score *s, const struct apr_top *) {
			*static_cast<double *>(arg) += static_cast<double>(s->logprob);
			return 0;
		};

		if (apr_score_ids(handle.get(), 0, ids.data(), ids.size(), 0, 0, add, &sum, nullptr, err, sizeof(err)))
			throw std::runtime_error(err);
		return sum / static_cast<double>(ids.size() - 1);
	}

private:
	struct Close {
		void operator()(struct apr *c) const { apr_close(c); }
	};
	std::unique_ptr<struct apr, Close> handle;
};

} // namespace

int main(int argc, char **argv)
{
	std::vector<std::string> sentences(argv + 1, argv + argc);

	if (sentences.empty())
		sentences = {"The cat sat on the mat.", "The mat sat on the cat.", "Mat the on sat cat the."};
	try {
		Session s;

		for (const std::string &text : sentences)
			std::printf("%9.4f  %s\n", s.mean_logprob(s.tokenize(text)), text.c_str());
	} catch (const std::exception &e) {
		std::fprintf(stderr, "%s\n", e.what());
		return 1;
	}
	return 0;
}
